"""One recorded forward pass: its operators, the values they made, and what backward keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValue:
    """The content of one storage between two writes."""

    storage: int  # the same number for all contents of one storage
    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    module: str
    producer: int | None  # operator's ordinal; None: made before the pass
    owned: bool  # by the model: a parameter or a buffer, kept anyway
    overwritten: bool  # later in the pass
    encoding: str | None  # that keeps the whole value exactly
    encoded_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One operator below autograd; values are named by their place in the record."""

    name: str
    inputs: tuple[int, ...]  # of every tensor argument, in order
    outputs: tuple[int, ...]
    took_ns: int
    refusal: str | None  # why it is never repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedUse:
    """One tensor that one backward node keeps."""

    value: int | None  # None: nothing is known about it
    after: int  # operators that ran before it was packed
    shape: tuple[int, ...]
    dtype: str
    consumer: str  # the node's name, or "" when it was not met
    order: int | None  # the later in forward, the earlier in backward
    encoding: str | None  # that is enough for this consumer
    encoded_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One forward pass."""

    operators: tuple[RecordedCall, ...]
    values: tuple[StepValue, ...]
    uses: tuple[SavedUse, ...]
    coding_ns_per_element: float  # to encode and decode a bit
    watch_ns: int = 0  # what the hooks cost a saved tensor, where the host's time counts
    hold_ns: int = 0  # and what an operator that may be repeated costs
    on_host: bool = True  # the operators ran on the CPU

    @property
    def forward_ns(self) -> int:
        return sum(call.took_ns for call in self.operators)
