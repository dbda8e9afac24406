"""What devices and machines can do, and how much of it a step used: data sheets, ceilings
that `calibrate` measured, times of single operators, FLOPs against peaks.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from stepscope.records.quality import Bytes, Cores, DurationNs, Ranks, Rate, Threads, UnixS
from stepscope.records.source_lines import Place
from stepscope.text.figures import significant
from stepscope.text.words import counted

# The peaks of devices from their data sheets: dense rates, memory, links, each with its source.
#
# Data sheets promise, `calibrate` measures: if both exist, the measured figure wins. The rows are
# in devices.json next to this file.

_AS_BLANKS = str.maketrans("_/-", "   ")
_VENDOR_WORDS = frozenset({"nvidia", "amd", "tesla", "instinct", "geforce"})
# Drivers keep some memory for themselves (ECC alone takes a sixteenth) and print the rest.
_MIN_MEMORY, _MAX_MEMORY = 0.90, 1.03


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One device as PyTorch counts them (one die of a card that holds two)."""

    name: str
    vendor: str
    # dtype -> dense FLOP/s. fp32 in full precision: on NVIDIA without tensor cores, AMD's matrix
    # cores do full fp32. fp64 with tensor or matrix cores if they support it.
    peaks: dict[str, float]
    bandwidth_bytes_s: float
    memory_bytes: int
    multiprocessors: int
    tensor_cores: bool
    link: str
    link_bytes_s: float  # both directions together
    source: str  # title of the document, section or table
    note: str = ""
    printed: tuple[str, ...] = ()  # as drivers print it, without words such as NVIDIA and Tesla


@lru_cache(maxsize=64)
def find_device(
    name: str, memory_bytes: int | None = None, multiprocessors: int | None = None
) -> DeviceSpec | None:
    """The device that a driver prints as `name`; None if that is not certain.

    Memory and multiprocessors distinguish devices with the same name, and exclude slices of a
    device.
    """
    wanted = plain_name(name)
    rows = [
        row for row in DEVICES if wanted in {plain_name(row.name), *map(plain_name, row.printed)}
    ]
    is_certain = len(rows) == 1 or wanted.startswith("mi250x")
    if not is_certain and memory_bytes is None:
        return None
    if memory_bytes is not None:
        rows = [
            row for row in rows if _MIN_MEMORY <= memory_bytes / row.memory_bytes <= _MAX_MEMORY
        ]
    if multiprocessors is not None:
        rows = [row for row in rows if row.multiprocessors == multiprocessors]
    if len({tuple(row.peaks.items()) for row in rows}) > 1 and not is_certain:
        return None
    return rows[0] if rows else None


def plain_name(name: str) -> str:
    """Lower case words without vendors: "NVIDIA A100-SXM4-80GB" -> "a100 sxm4 80gb"."""
    words = name.lower().split(":")[0].replace("(tm)", "").translate(_AS_BLANKS).split()
    while words and words[0] in _VENDOR_WORDS:
        words = words[1:]
    return " ".join(words)


class _DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of devices.json, in the units of data sheets."""

    name: str
    printed: tuple[str, ...]
    vendor: str
    tflops: dict[str, float]  # dense: data sheets often print twice as much ("with sparsity")
    bandwidth_gb_s: float
    memory_gib: int  # what data sheets call GB
    multiprocessors: int
    tensor_cores: bool = True
    link: str
    link_gb_s: float
    source: str
    note: str = ""


_SAME = [name for name in _DeviceRow.__struct_fields__ if name in DeviceSpec.__struct_fields__]


def _spec(row: _DeviceRow) -> DeviceSpec:
    return DeviceSpec(
        **{name: getattr(row, name) for name in _SAME},
        peaks={dtype: rate * 1e12 for dtype, rate in row.tflops.items()},
        bandwidth_bytes_s=row.bandwidth_gb_s * 1e9,
        memory_bytes=row.memory_gib << 30,
        link_bytes_s=row.link_gb_s * 1e9,
    )


def _read() -> tuple[DeviceSpec, ...]:
    text = Path(__file__).with_name("devices.json").read_bytes()
    return tuple(map(_spec, msgspec.json.decode(text, type=tuple[_DeviceRow, ...])))


DEVICES = _read()


# The ceilings of a machine and its group of ranks, as `calibrate` measured them.
#
# Rates are per second, times in nanoseconds; a ceiling that was not measured is absent, never zero.

PROFILE_SCHEMA = 1
_Ns = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Spread = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # a share of a time; may exceed 1


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """time = alpha + beta x bytes, between two sizes."""

    from_bytes: Bytes
    to_bytes: Bytes
    alpha_ns: _Ns
    beta_ns_per_byte: _Ns

    def at(self, size_bytes: float) -> float:
        return self.alpha_ns + self.beta_ns_per_byte * size_bytes


_Line = Annotated[tuple[Segment, ...], msgspec.Meta(min_length=1)]


class MeasuredSize(msgspec.Struct, frozen=True, kw_only=True):
    """One size: the median over passes, and the lowest and highest pass."""

    size_bytes: Bytes
    time_ns: DurationNs
    low_ns: DurationNs
    high_ns: DurationNs


class CollectiveFit(msgspec.Struct, frozen=True, kw_only=True):
    """How long one kind of collective takes in groups of one size.

    Errors are shares of the time: 0.05 is 5%. `noise` is how far passes differ at the same size,
    `held_out` how far a fit without a pass is from that pass, `held_out_sizes` how far one without
    that size is. All three are medians.
    """

    kind: str
    group: str  # world, intra-host, inter-host or pairs
    group_size: Ranks
    segments: _Line
    measured: tuple[MeasuredSize, ...]
    passes: Threads
    noise: _Spread
    held_out: _Spread
    held_out_sizes: _Spread

    def expected_ns(self, size_bytes: float) -> float:
        """Uses the first segment below the measured sizes and the last one above them."""
        for segment in self.segments:
            if size_bytes <= segment.to_bytes:
                return segment.at(size_bytes)
        return self.segments[-1].at(size_bytes)

    @property
    def latency_ns(self) -> float:
        """The time of a collective of no bytes."""
        return self.segments[0].alpha_ns


class Contention(msgspec.Struct, frozen=True, kw_only=True):
    """What an all-reduce and compute cost each other on shared processors."""

    group_size: Ranks
    lost: _Spread  # compute during it loses this share of the time the all-reduce takes alone
    beside: _Line  # how long the all-reduce takes while compute runs


BUSY = 0.15  # of the cores, by other processes


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One calibration: the machine's ceilings and, with ranks, its collectives."""

    schema: int = PROFILE_SCHEMA
    host: str
    device: str
    kind: str  # cuda, rocm or cpu
    torch: str
    when_unix: UnixS
    world_size: Ranks
    backend: str | None
    threads: Threads
    matmul_flops: dict[str, Rate]  # dtype -> FLOP/s
    sustained_flops: dict[str, Rate] = {}  # the same without rests, of a GPU
    copy_bytes_s: Rate | None = None  # read plus written
    host_to_device_bytes_s: Rate | None = None  # pinned, bytes once
    device_to_host_bytes_s: Rate | None = None
    launch_ns: _Ns | None = None  # the host's cost of an empty kernel
    launch_gap_ns: _Ns | None = None  # start to start of empty kernels already queued
    tiny_op_ns: _Ns | None = None  # the host's cost of an operator on one element
    spread: dict[str, _Spread] = {}  # interquartile range / median, by ceiling
    not_offered: dict[str, str] = {}  # dtype or "kind, group" -> the reason
    fits: tuple[CollectiveFit, ...] = ()
    contention: Contention | None = None  # of the world; not measured on an accelerator
    # On a CPU: the cores that other processes kept busy, in the quietest round.
    other_cores: Cores | None = None
    cores: Cores | None = None
    rounds: Threads = 1  # repetitions of all measurements; the best counts
    hosts: Ranks | None = None  # on which the ranks were; None if not noted

    def fit_for(self, kind: str, group_size: int, group: str | None = None) -> CollectiveFit | None:
        """The fit for exactly this group size, None if it was not measured.

        If several groups have that size, the first measured one, unless `group` names another.
        """
        for fit in self.fits:
            if (fit.kind, fit.group_size) == (kind, group_size) and group in (None, fit.group):
                return fit
        return None

    @property
    def doubt(self) -> str:
        """A sentence on why a CPU's measured ceilings may be too low, else empty."""
        others, cores = self.other_cores, self.cores
        if self.kind != "cpu" or others is None or not cores or others < BUSY * cores:
            return ""
        return (
            f"calibrated while other processes kept {significant(others)} of {cores:g} cores busy: "
            "the machine can do more than these ceilings; run stepscope calibrate again when it is "
            "idle"
        )


# How much of the device's peak a step used. Rates are per second, times integer nanoseconds.

PeakSource = Literal["table", "calibrated"]
Bound = Literal["compute", "memory", "unknown"]
Phase = Literal["forward", "backward", "optimizer", "other"]


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """The device's peaks, and where each comes from."""

    device: str
    flops: dict[str, float]  # dtype (fp64, fp32, tf32, fp16, bf16, fp8) -> dense FLOP/s
    bytes_s: float | None  # memory traffic, read and write together
    flops_source: dict[str, PeakSource]
    bytes_source: PeakSource | None
    source: str  # where the figures come from, as a sentence
    threads: int | None = None  # used to measure a CPU's figures
    doubt: str = ""  # why the measured figures may be too low, as a sentence; may be empty


class DtypeUse(msgspec.Struct, frozen=True, kw_only=True):
    """Matmul-like work of one dtype."""

    dtype: str
    flops: int  # in one step
    device_ns: int  # in one step
    tensor_core_ns: int  # the part in kernels that used tensor (matrix) cores
    peak_flops: float | None


class Spot(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one operator with the same shapes, on the roofline. Amounts are per step."""

    operator: str
    shapes: str = ""
    dtype: str
    calls: float
    device_ns: float
    flops: float | None
    bytes_moved: float | None
    intensity: float | None = None  # FLOPs per byte
    achieved_flops: float | None = None  # per second
    ceiling_flops: float | None = None  # per second, at this intensity
    roof_ns: float | None = None  # max(FLOPs / peak, bytes / bandwidth)
    gap_ns: float | None = None  # device_ns - roof_ns
    bound: Bound = "unknown"
    phase: Phase
    recomputed: bool = False
    place: Place | None = None  # of a compiled kernel, and of the optimizer's: its line


MOST_SHAPES = 3  # in a sentence


def which_call(spot: Spot, most: int | None = None) -> str:
    """Return what tells a spot from others of its operator: its shapes, else its line."""
    words = shape_words(spot.shapes, most)
    return words if words or spot.place is None else spot.place.short


def shape_words(shapes: str, most: int | None = None) -> str:
    """Return `8192×768, 768×2304` for the profiler's JSON, without arguments that have no shape."""
    try:
        given = msgspec.json.decode(shapes)
    except msgspec.DecodeError:
        return shapes
    if not isinstance(given, list):
        return shapes
    words = [
        counted(len(dims), "tensor")
        if any(isinstance(size, list) for size in dims)
        else "×".join(map(str, dims))
        for dims in given
        if isinstance(dims, list) and dims
    ]
    if most is not None and len(words) > most:
        words = [*words[:most], "…"]
    return ", ".join(words)


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs of one step against the peak of the dtype that did most of them."""

    mfu: float | None
    hfu: float | None
    model_flops: int
    hardware_flops: int  # model and recomputed
    recomputed_flops: int
    peak_flops: float | None
    peak_source: PeakSource | None
    dtype: str | None
    unknown_share: float  # of device time: kernels whose FLOPs are unknown
    tensor_core_share: float | None  # of matmul-like device time
    step_ms: float | None  # the step that MFU is computed over
    by_dtype: tuple[DtypeUse, ...]
    ceilings: Ceilings | None
    spots: tuple[Spot, ...]  # the widest gap first
    devices: int = 1  # on which this rank computed
    notes: tuple[str, ...] = ()  # what was assumed, such as an unknown causal mask


# What `calibrate --algorithms` found: what a step costs, and each algorithm against its formula.
#
# Times are in nanoseconds; shares are of the vector that the collective is about.


class LinkModel(msgspec.Struct, frozen=True, kw_only=True):
    """What one step of a schedule costs, measured by probes and not by the algorithms.

    A line is alpha + beta x the bytes that the busiest rank sends or gets in the step.
    """

    start_ns: float  # a call, apart from its steps
    hop: tuple[Segment, ...]  # every rank sends to its neighbour
    pair: tuple[Segment, ...]  # two ranks exchange, the others rest
    inside: tuple[Segment, ...] | None = None  # neighbours on one host; None with one host
    gamma_ns_per_byte: float  # adding what came
    message_ns: float  # each further message that a rank sends in a step
    noise: float  # how far passes of `hop` differ

    @property
    def alpha_ns(self) -> float:
        return self.hop[0].alpha_ns

    @property
    def beta_ns_per_byte(self) -> float:
        return self.hop[-1].beta_ns_per_byte


class PredictedSize(MeasuredSize, frozen=True, kw_only=True):
    """One size as measured, and what the formula says; None for the backend's own algorithm."""

    predicted_ns: float | None


class AlgorithmTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One algorithm of one collective; the backend's own has no formula."""

    kind: str
    algorithm: str
    formula: str | None
    steps: int | None
    sent: float | None  # by the busiest rank, in multiples of the vector
    added: float | None
    sizes: tuple[PredictedSize, ...]
    error: float | None  # median of |predicted / measured - 1| over the sizes


class AlgorithmCrossover(msgspec.Struct, frozen=True, kw_only=True):
    """`below` is faster up to a size, `above` beyond it; None if the times never cross."""

    kind: str
    below: str
    above: str
    predicted_bytes: float
    measured_bytes: float | None


class LaboratoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, with where it was measured."""

    host: str
    device: str
    kind: str
    torch: str
    when_unix: float
    backend: str
    world_size: int
    hosts: tuple[tuple[int, ...], ...]  # ranks of each host
    groups: tuple[tuple[int, ...], ...]  # that hierarchical used
    checked: int  # comparisons with torch before the measurement
    link: LinkModel  # of the first collective; each has probes of its own
    algorithms: tuple[AlgorithmTimes, ...]
    crossovers: tuple[AlgorithmCrossover, ...]


# How long single operators take: what identifies a call, and what was measured of it.


class OperatorCall(msgspec.Struct, frozen=True, kw_only=True):
    """One distinct call. Lists have one entry per argument and are JSON text, as in a trace."""

    name: str
    shapes: str
    strides: str
    dtypes: str
    concrete: str
    grads: str  # "1" for each argument that needs a gradient, else "0"
    mode: str = ""  # as records/change_values.py names them

    def request(self) -> dict[str, Any]:
        """Write it as the process that times it reads it."""
        lists = {
            name: msgspec.json.decode(text) if text else None
            for name in ("shapes", "strides", "dtypes", "concrete")
            for text in (getattr(self, name),)
        }
        grads = [mark == "1" for mark in self.grads]
        return {"name": self.name, "mode": self.mode, "grads": grads, **lists}


class Output(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a call returns."""

    shape: tuple[int, ...]
    dtype: str
    needs_gradient: bool


class PassTime(msgspec.Struct, frozen=True, kw_only=True):
    ns: float
    spread: float  # half of the 95% interval, relative
    repeats: int


class ProbedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """Where a time was measured. A CPU is known by its host and its number of threads."""

    kind: str  # cuda, cpu
    device: str
    host: str = ""
    threads: int = 0
    torch: str = ""
    cudnn: str = ""
    driver: str = ""

    @property
    def place(self) -> str:
        """The device without its software; times of another place never stand for it."""
        return self.device or cpu_place(self.host, self.threads)

    @property
    def software(self) -> str:
        named = {"torch": self.torch, "cuDNN": self.cudnn, "driver": self.driver}
        return ", ".join(f"{name} {version}" for name, version in named.items() if version)


def cpu_place(host: str, threads: int) -> str:
    """A CPU as a place of times; 0 threads: not known, as many as torch takes."""
    return f"CPU of {host}, {counted(threads, 'thread')}" if threads else f"CPU of {host}"


class OperatorTime(msgspec.Struct, frozen=True, kw_only=True):
    call: OperatorCall
    outputs: tuple[Output, ...]
    forward: PassTime | None  # None: only what it returns is known
    backward: PassTime | None  # None: it has no backward, or was not timed
    place: str
    software: str
    host_ns: float | None = None  # the host's time to launch both passes
    source: str = "probe"  # or the file that it was imported from
    when_unix: float = 0.0


class TimesFile(msgspec.Struct, frozen=True, kw_only=True):
    """What `library export` writes."""

    schema: int
    times: tuple[OperatorTime, ...]


# What a probe of a step's operators found.

OUT_OF_TIME = "the budget was over before its turn"


class ProbedOperator(msgspec.Struct, frozen=True, kw_only=True):
    """One distinct call of the step, per step."""

    name: str
    shapes: str
    count: int
    traced_ms: float  # both passes, in the trace's precision
    probed_ms: float | None  # the same by the probe; None: not timed
    modes_ms: dict[str, float]  # by the other precisions asked for
    spread: float | None  # half of the 95% interval of `probed_ms`, relative


class UnprobedOperator(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    shapes: str
    mode: str
    share: float  # of the traced operators' time
    why: str


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    place: str  # where it was timed
    traced_place: str | None  # where the trace ran
    software: str
    modes: tuple[str, ...]
    operators: tuple[ProbedOperator, ...]  # longest first
    unprobed: tuple[UnprobedOperator, ...]  # most expensive first
    traced_ms: float  # everything that the step's device runs
    probed_share: float  # of `traced_ms`: timed in all modes
    # The timed calls in the trace's own precision: what the trace and what the probe says.
    same_traced_ms: float
    same_probed_ms: float
    # By precision: what autocast adds to the host's time of a step; not there if not measured.
    host_added_ms: dict[str, float] = {}
    budget_s: float
    wall_s: float
    saved: int  # times written to the library
    notes: tuple[str, ...] = ()

    @property
    def difference(self) -> float | None:
        """The probe's sum over the trace's, minus one."""
        return self.same_probed_ms / self.same_traced_ms - 1 if self.same_traced_ms else None
