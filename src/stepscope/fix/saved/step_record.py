"""One recorded forward pass: its operators, the values they made, what backward keeps, and
the encodings each value may have.
"""

from __future__ import annotations

from dataclasses import dataclass

_STEP_PER_FORWARD = 3
# Of the device's memory: promises of peaks are off by up to 4%, blocks are rounded up, and holes
# stay between them.
_LEFT_FREE, _LEFT_FREE_EXPANDABLE = 0.12, 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingOption:
    """One way to hold a value, or what one consumer reads of it."""

    encoding: str  # as the registry of encodings reads it
    held_bytes: int
    cost_ns: int  # to encode and decode once

    def worth(self, bytes_per_ns: float) -> int:
        """Bytes held and time, in bytes."""
        return self.held_bytes + round(self.cost_ns * bytes_per_ns)


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
    copied: bool = False  # a private copy of what the pass did not make, to start from
    options: tuple[HoldingOption, ...] = ()  # that hold the whole value


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One operator below autograd; values are named by their place in the record."""

    name: str
    inputs: tuple[int, ...]  # of every tensor argument, in order
    outputs: tuple[int, ...]
    took_ns: int
    refusal: str | None  # why it is never repeated
    heavy: bool = False  # it may be repeated because that was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedUse:
    """One tensor that one backward node keeps."""

    value: int | None  # None: nothing is known about it
    after: int  # operators that ran before it was packed
    shape: tuple[int, ...]
    dtype: str
    consumer: str  # the node's name, or "" when it was not met
    order: int | None  # the later in forward, the earlier in backward
    options: tuple[HoldingOption, ...] = ()  # that are enough for this consumer


@dataclass(frozen=True, slots=True)
class BackwardReading:
    """What the allocator held in backward from one read of a saved tensor to the next."""

    use: int | None  # that was read; None: before the first
    begun_bytes: int  # when it was read
    peak_bytes: int  # the most until the next


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSurroundings:
    """What torch's allocator held around the pass, on devices where it keeps an account."""

    begun_bytes: int  # when the pass began
    ended_bytes: int
    gradient_bytes: int  # of weights that have no gradient yet
    limit_bytes: int | None  # what this process may hold at most
    expandable: bool = False  # the allocator's segments grow: hardly any holes stay between blocks

    def usable_bytes(self, limit_bytes: int) -> int:
        """Return how many of these bytes a plan may promise."""
        return int(limit_bytes * (1 - (_LEFT_FREE_EXPANDABLE if self.expandable else _LEFT_FREE)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One forward pass."""

    operators: tuple[RecordedCall, ...]
    values: tuple[StepValue, ...]
    uses: tuple[SavedUse, ...]
    # What following a plan costs the host:
    watch_ns: int = 0  # every operator and every saved tensor that passes through Python
    repeat_ns: int = 0  # an operator that is repeated, or an encoding, on top of its own time
    slack_ns: int = 0  # by which the host is faster than the device: so much costs nothing
    dearer: float = 1.0  # what the plan's own steps added, over what was planned
    on_host: bool = True  # the operators ran on the CPU
    surroundings: StepSurroundings | None = None
    outputs: tuple[int, ...] = ()  # values that the pass returned
    readings: tuple[BackwardReading, ...] = ()
    measured_step_ns: int | None = None  # of whole steps before this one

    @property
    def step_ns(self) -> int:
        """As measured; else as long as forward and a backward with twice its work."""
        forward_ns = sum(call.took_ns for call in self.operators)
        return self.measured_step_ns or _STEP_PER_FORWARD * forward_ns


# The names of encodings, as plans write them: a word, then what it needs to know.
#
#     bits | two-valued | window 2,2/2,2/0,0/1,1/8,8 | sparse | narrow uint8    hold a value
#     sign | shape | above 0 | within -1.0 1.0 | ...    for one consumer
#     bf16 | fp16 | fp8-e4m3 | fp8-e5m2 | 4-bit         lossy

LOSSY = ("bf16", "fp16", "fp8-e4m3", "fp8-e5m2", "4-bit")


def is_lossy(encoding: str) -> bool:
    return encoding in LOSSY


def described(encoding: str) -> str:
    """For people: the word alone, and whether something is lost."""
    word = encoding.partition(" ")[0]
    return f"{word} (lossy)" if is_lossy(word) else word
