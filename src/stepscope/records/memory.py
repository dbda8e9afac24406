"""What filled the memory of one rank: bytes by category, where they came from, the graph of
its backward pass, what `save_memory` did, and what would fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from stepscope.records.quality import Bytes, Count, DurationNs, Note

if TYPE_CHECKING:
    from stepscope.records.trace import Int8, Int32, Int64

# Each storage counts once. None means unknown, never zero. If all `categories` at the peak are
# known, they add up to it.

CATEGORIES = (
    *("parameters", "gradients", "optimizer", "activations", "buffers", "temporaries"),
    "other",
)
# What a step needs at any batch size.
STATES = ("parameters", "gradients", "optimizer", "buffers")

Source = Literal["capture", "trace", "snapshot"]
LimitFrom = Literal["device", "given"]
Categories = dict[str, int | None]
CapturedCategories = dict[str, Bytes | None]


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """The memory held at one moment of a step, such as the end of forward."""

    name: str
    categories: Categories
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None


class ModuleBytes(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that one module keeps for backward."""

    module: str
    size_bytes: int
    tensors: int


class PoolBytes(msgspec.Struct, frozen=True, kw_only=True):
    """A private pool: segments that a CUDA graph keeps for its replays."""

    pool: str  # the allocator's number
    size_bytes: int


class SiteBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes allocated at one place in the code and held at the peak."""

    operator: str
    size_bytes: int
    blocks: int
    category: str | None = None
    file: str | None = None
    line: int | None = None
    function: str = ""


class PhaseSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of the step in a timeline; times count from the timeline's start."""

    name: str
    start_ns: int
    dur_ns: int


class MemoryTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """Thinned to the highest and lowest point of every stretch, so that the peak is exact."""

    of: str  # the step, or whatever it shows
    start_ns: int
    time_ns: tuple[int, ...]  # since start
    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...] | None
    categories: dict[str, tuple[int, ...]]  # only the known ones
    phases: tuple[PhaseSpan, ...] = ()


class Fragmentation(msgspec.Struct, frozen=True, kw_only=True):
    """Memory reserved from the device but not allocated."""

    at: Literal["peak", "end"]
    allocated_bytes: int
    reserved_bytes: int
    share: float  # 1 - allocated / reserved
    largest_free_bytes: int | None = None  # the largest block that could be allocated
    free_blocks: int | None = None


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes alive between one step and the next."""

    source: Literal["steps", "trace", "capture"]
    ends_bytes: tuple[int, ...]
    bytes_per_step: int  # median
    steady: bool  # by about the same in every step: a leak
    skipped: int = 0  # first steps, in which state is still allocated


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the device could not meet."""

    asked_bytes: int
    device_free_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int | None
    file: str | None = None
    line: int | None = None
    function: str = ""


class BatchLine(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of the step as a straight line: fixed + scaling x (batch / batch now).

    Of the scaling bytes, `maybe_fixed_bytes` may be fixed; of the fixed ones,
    `maybe_scaling_bytes` may scale.
    """

    moment: str
    fixed_bytes: int
    scaling_bytes: int
    maybe_fixed_bytes: int = 0
    maybe_scaling_bytes: int = 0


class LargestBatch(msgspec.Struct, frozen=True, kw_only=True):
    """How far the batch can grow before memory is full; the moment that fills first decides."""

    lines: tuple[BatchLine, ...]
    batch: int | None  # now, from the shapes of the inputs of one forward pass
    batch_from: str | None
    batches_per_step: int | None = 1  # several where gradients accumulate; None is not known
    per_sample_bytes: int | None
    limit_bytes: int | None
    limit_from: LimitFrom | None
    reserve_bytes: int  # of the limit: left for the driver and for rounding
    factor: float | None  # of the batch now
    factor_low: float | None
    factor_high: float | None
    largest: int | None
    low: int | None
    high: int | None


class ActivationTheory(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that a step keeps for backward, by formula and as measured."""

    model: str
    formula: str
    per_sample_bytes: int
    total_bytes: int
    measured_bytes: int | None


class ZeroRow(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters, gradients and optimizer state of one rank at one ZeRO stage."""

    stage: int
    ranks: int
    size_bytes: int
    volume: float  # communication, relative to plain data parallelism


class Theory(msgspec.Struct, frozen=True, kw_only=True):
    """What arithmetic predicts, to compare with the measurement."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    shards: int  # into which the measured bytes were already divided
    zero: tuple[ZeroRow, ...]
    activations: ActivationTheory | None = None
    notes: tuple[str, ...] = ()


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's memory in one step."""

    source: Source
    device: str  # cuda, cpu, ...
    peak_bytes: int
    reserved_bytes: int | None  # at the peak or, from a capture, the most in the step
    phase: str | None  # of the peak
    measured: str  # how, in words
    categories: Categories  # at the peak
    moments: tuple[Moment, ...] = ()
    by_module: tuple[ModuleBytes, ...] = ()
    by_site: tuple[SiteBytes, ...] = ()
    pools: tuple[PoolBytes, ...] = ()  # private ones; their bytes are in the categories
    timeline: MemoryTimeline | None = None
    fragmentation: Fragmentation | None = None  # at the peak or, if that is unknown, at the end
    at_end: Fragmentation | None = None  # of a snapshot
    growth: Growth | None = None
    out_of_memory: tuple[OutOfMemory, ...] = ()
    theory: Theory | None = None
    largest_batch: LargestBatch | None = None
    limit_bytes: int | None = None
    saving: SavedMemory | None = None  # what `save_memory` did, if it ran
    notes: tuple[str, ...] = ()


class CapturedPhase(msgspec.Struct, frozen=True):
    """The end of a phase, as capture wrote it."""

    phase: str
    categories: CapturedCategories
    allocated_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None


class CapturedPeak(msgspec.Struct, frozen=True):
    """The highest point of the step, as capture wrote it."""

    categories: CapturedCategories = {}
    phase: str | None = None
    allocated_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None
    known_bytes: Bytes | None = None
    since_start_bytes: Bytes | None = None
    rounding_bytes: Bytes | None = None
    measured: str = ""


class CapturedModule(msgspec.Struct, frozen=True):
    """Activations of one module, as capture wrote them."""

    module: str
    bytes: Bytes
    tensors: Count = 0


class CapturedProducer(msgspec.Struct, frozen=True):
    """Activations that one kind of operator made; of the free ones, what it read is kept too."""

    producer: str  # Gelu; "" where nobody knows
    bytes: Bytes
    free_bytes: Bytes = 0
    tensors: Count = 0


class CapturedPool(msgspec.Struct, frozen=True):
    """A private pool, as capture wrote it."""

    pool: str
    bytes: Bytes


class CapturedInputs(msgspec.Struct, frozen=True):
    """What an outermost module was called with, as often as it came in the step."""

    module: str  # its class
    shapes: list[list[Count]]  # of the tensors that no module made
    calls: Count = 1


class CapturedMemory(msgspec.Struct, frozen=True):
    """memory.json of a rank's folder. Without a device and a peak it describes no step."""

    device: str | None = None
    peak: CapturedPeak | None = None
    growing: CapturedPeak | None = None  # the moment with most of what grows with the batch
    categories: CapturedCategories = {}  # the largest size of each in the step
    phases: list[CapturedPhase] = []
    activations_by_module: list[CapturedModule] = []
    activations_by_producer: list[CapturedProducer] = []
    inputs_bytes: Bytes | None = None
    prepared_bytes: Bytes | None = None  # other batches that the script holds
    inputs: list[CapturedInputs] = []
    elsewhere_bytes: dict[str, Bytes] = {}
    pools: list[CapturedPool] = []
    pools_unknown_bytes: Bytes | None = None  # of the pools' bytes: temporaries, workspaces, ...
    graph: CapturedBackward | None = None  # of the backward pass that held most
    notes: list[str] = []

    @property
    def batches_bytes(self) -> int:
        """The step's batch and those prepared for later: all grow with the batch size."""
        return (self.inputs_bytes or 0) + (self.prepared_bytes or 0)


class Segments(msgspec.Struct, frozen=True, kw_only=True):
    """The allocator's segments of device memory, one row each."""

    device: Int32
    address: Int64
    total_bytes: Int64
    private: Int8  # 1: of a pool that a CUDA graph, or the script, keeps for itself

    def __len__(self) -> int:
        return len(self.address)


class Blocks(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks that segments are divided into, one row each."""

    segment: Int32
    address: Int64
    size_bytes: Int64
    requested_bytes: Int64
    state: Int8  # index into BLOCK_STATES
    stack: Int32  # index into Snapshot.stacks, -1 if none was recorded

    def __len__(self) -> int:
        return len(self.address)


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The actions of one device's allocator, in order."""

    device: int
    action: Int8  # index into ACTIONS
    address: Int64  # for "oom": the bytes that the device had free
    size_bytes: Int64
    time_us: Int64  # -1 if it was not recorded
    stack: Int32

    def __len__(self) -> int:
        return len(self.address)


ACTIONS = (
    *("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"),
    *("segment_map", "segment_unmap", "oom", "snapshot", "unknown"),
)
BLOCK_STATES = ("active_allocated", "active_pending_free", "inactive", "unknown")


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A CUDA memory snapshot as columns."""

    path: str
    segments: Segments
    blocks: Blocks
    histories: tuple[History, ...]
    stacks: tuple[tuple[tuple[str, int, str], ...], ...]  # frames, innermost first
    unknown_actions: tuple[str, ...] = ()
    quality: tuple[Note, ...] = ()


# The autograd graph of one backward pass, as capture wrote it into memory.json.

StorageKind = Literal["activation", "state", "input"]
LEAF = "AccumulateGrad"


class GraphOutput(msgspec.Struct, frozen=True, array_like=True):
    """A result of a forward operator, and so the gradient that its node receives."""

    elements: Count
    dtype: str


class GraphEdge(msgspec.Struct, frozen=True, array_like=True):
    """The node that made an input, and which of its results that is."""

    node: int  # -1: the input needs no gradient
    output: Count


class GraphSaved(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a node keeps until it has run."""

    field: str  # PyTorch's name of it: self, mat2, result
    storage: Count
    elements: Count
    dtype: str


class GraphStorage(msgspec.Struct, frozen=True, array_like=True):
    size_bytes: Bytes
    kind: StorageKind


class GraphModule(msgspec.Struct, frozen=True, array_like=True):
    path: str
    type: str
    elements: Count  # of its parameters
    recomputes: bool  # transformers would checkpoint it


class GraphNode(msgspec.Struct, frozen=True, array_like=True):
    name: str  # AddmmBackward0, or LEAF for a parameter's gradient
    module: int  # that called the operator, -1 for none
    outputs: list[GraphOutput]
    inputs: list[GraphEdge]
    saved: list[GraphSaved]

    @property
    def is_leaf(self) -> bool:
        return self.name == LEAF


class CapturedBackward(msgspec.Struct, frozen=True):
    """Nodes in the order in which forward made them, leaves last."""

    modules: list[GraphModule] = []
    storages: list[GraphStorage] = []
    nodes: list[GraphNode] = []
    hidden: Count = 0  # nodes made under the script's own hooks: what they keep is not known

    @property
    def is_sound(self) -> bool:
        """Whether every number in it names something that exists."""
        return all(
            node.module < len(self.modules)
            and all(
                edge.node < len(self.nodes)
                and (edge.node < 0 or edge.output < max(1, len(self.nodes[edge.node].outputs)))
                for edge in node.inputs
            )
            and all(saved.storage < len(self.storages) for saved in node.saved)
            for node in self.nodes
        )


# What `save_memory` did in a training: memory-plan.json of a rank's folder.

SAVING_FILE = "memory-plan.json"
SAVING_ACTIONS = ("keep", "recompute", "encode", "offload")


class SavedByAction(msgspec.Struct, frozen=True, kw_only=True):
    """All values that are treated alike."""

    action: str
    values: Count = 0
    before_bytes: Bytes = 0  # that they held without the plan
    held_bytes: Bytes = 0  # and hold with it
    cost_ns: DurationNs = 0


class SavedValue(msgspec.Struct, frozen=True, kw_only=True):
    """One of the largest values."""

    value: str = ""  # shape and dtype
    module: str = ""
    operator: str = ""  # that made it
    size_bytes: Bytes = 0
    held_bytes: Bytes = 0
    action: str = ""
    cost_ns: DurationNs = 0


class SavingTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes kept for backward through a step: `forward_points` of forward, then backward's."""

    forward_points: Count = 0
    before_bytes: dict[str, list[Bytes]] = {}  # by what is done with the values
    after_bytes: list[Bytes] = []

    def is_whole(self) -> bool:
        """Whether all its lines are equally long, and long enough to draw."""
        points = len(self.after_bytes)
        return points > 1 and all(len(line) == points for line in self.before_bytes.values())


class SavedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes are of what backward keeps, but `step_peak_bytes` of the whole step; None where torch
    keeps no account of its memory."""

    target: str = ""
    saved_bytes_before: Bytes = 0
    saved_bytes: Bytes = 0
    held_bytes: Bytes | None = None  # counted in a pass that followed the plan
    peak_bytes_before: Bytes = 0
    peak_bytes: Bytes = 0
    step_peak_bytes_before: Bytes | None = None
    step_peak_bytes: Bytes | None = None
    step_ns_before: DurationNs | None = None
    step_ns: DurationNs | None = None  # promised
    step_low_ns: DurationNs | None = None
    step_high_ns: DurationNs | None = None
    measured_step_ns: DurationNs | None = None
    extra_ns: DurationNs = 0
    actions: list[SavedByAction] = []
    values: list[SavedValue] = []
    timeline: SavingTimeline | None = None
    notes: list[str] = []
