"""One recorded forward pass: its operators, the values they made, what backward keeps, and
the encodings each value may have.
"""

from __future__ import annotations

from dataclasses import dataclass

_STEP_PER_FORWARD = 3
# What repeated operators take on a GPU beside others, over what they took alone, before steps have
# shown it. Measured on an H200: 1.13 (ResNet-50), 1.15 (Inception-v3), 1.05 (BERT-large).
USUALLY_DEARER = 1.1
# Of the device's memory: promises of peaks are off by up to 4%, blocks are rounded up, and holes
# stay between them.
_LEFT_FREE, _LEFT_FREE_EXPANDABLE = 0.12, 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingOption:
    """One way to hold a value, or what one consumer reads of it, as measured in the pass."""

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
    needed_again: bool = False  # to repeat the operator that made it: it is never given up
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
    again: str | None = None  # a cheaper way to repeat it, as norm_recompute.py names it
    cheaper_ns: int | None = None  # and what that takes
    heavy: bool = False  # it may be repeated because that was asked for

    @property
    def again_ns(self) -> int:
        """Return what repeating it takes."""
        return self.took_ns if self.cheaper_ns is None else self.cheaper_ns


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


def cheapest(options: tuple[HoldingOption, ...], bytes_per_ns: float) -> HoldingOption | None:
    """Return the cheapest option; None where there is none."""
    return min(options, key=lambda option: option.worth(bytes_per_ns), default=None)


@dataclass(frozen=True, slots=True)
class NodePeak:
    """The bytes allocated in backward from one read of a saved tensor to the next."""

    use: int | None  # that was read; None: before the first
    peak_bytes: int  # until its node had run, if that is known
    begun_bytes: int | None = None  # when it was read; None: not known
    after_bytes: int | None = None  # the most from then on; None: no more than until then


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


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Between a device and host memory, measured; `host_ns` is what a value costs the host."""

    out_bytes_per_ns: float
    in_bytes_per_ns: float
    host_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One forward pass."""

    operators: tuple[RecordedCall, ...]
    values: tuple[StepValue, ...]
    uses: tuple[SavedUse, ...]
    # What following a plan costs, where the host's time counts:
    watch_ns: int = 0  # every saved tensor that the pack hook sees
    replace_ns: int = 0  # one that is not kept, on top of that
    repeat_ns: int = 0  # an operator that is repeated, on top of its own time
    launch_ns: int = 0  # on a GPU: the host's own part of an operator
    host_slack_ns: int | None = None  # by which the host is faster than the device; None: not known
    # What the steps of earlier plans have shown, on GPUs:
    dearer: float = 1.0  # what operators take beside others, over what they took alone
    most_host_ns: int | None = None  # that following a plan may cost the host; None: not known
    may_wait: bool = True  # for encodings whose size the device has to tell the host
    may_offload: bool = True  # False where the device waited for offloaded values
    on_host: bool = True  # the operators ran on the CPU
    link: LinkSpeed | None = None  # to host memory, where there is one
    surroundings: StepSurroundings | None = None
    outputs: tuple[int, ...] = ()  # values that the pass returned
    backward_peaks: tuple[NodePeak, ...] = ()
    measured_step_ns: int | None = None  # of whole steps before this one

    @property
    def backward_was_read(self) -> bool:
        return any(reading.use is not None for reading in self.backward_peaks)

    @property
    def forward_ns(self) -> int:
        return sum(call.took_ns for call in self.operators)

    @property
    def step_ns(self) -> int:
        """As measured; else as long as forward and a backward with twice its work."""
        return self.measured_step_ns or _STEP_PER_FORWARD * self.forward_ns


# The names of encodings, as plans write them: a word, then what it needs to know.
#
#     bits | two-valued | window 2,2/2,2/0,0/1,1/8,8 | sparse 0.51 | narrow uint8    hold a value
#     sign | shape | above 0 | within -1.0 1.0 | ...    for one consumer
#     bf16 | fp16 | fp8-e4m3 | fp8-e5m2 | 4-bit         lossy
#     offload 12 40                                     in host memory

LOSSY = ("bf16", "fp16", "fp8-e4m3", "fp8-e5m2", "4-bit")
OFFLOAD = "offload"
_WAITING = ("sparse", "narrow")


def is_lossy(encoding: str) -> bool:
    return encoding in LOSSY


def host_waits(encoding: str) -> bool:
    """On a GPU: the host stays close behind the device to learn whether the value fitted."""
    return encoding.partition(" ")[0] in _WAITING


def described(encoding: str) -> str:
    """For people: the word alone, and whether something is lost."""
    word = encoding.partition(" ")[0]
    return f"{word} (lossy)" if is_lossy(word) else word


@dataclass(frozen=True, slots=True)
class OffloadPoints:
    """Saved tensors by number. When `left_at` is packed, the copy to host memory is over; when
    `fetch_at` is unpacked, it is time to fetch the value."""

    left_at: int
    fetch_at: int

    def encoding(self) -> str:
        return f"{OFFLOAD} {self.left_at} {self.fetch_at}"

    @classmethod
    def of(cls, encoding: str | None) -> OffloadPoints | None:
        """None of other encodings, and of an offload without points."""
        word, *points = (encoding or "none").split()
        return cls(*map(int, points)) if word == OFFLOAD and points else None
