"""Describe GPUs as predictions need them: found by name or file, with data sheets, fitted
numbers and the rates that kernels reach.
"""

from __future__ import annotations

import math
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.predict.fitted import read_fitted, table
from stepscope.records.hardware import DEVICES, Profile, plain_name
from stepscope.text.words import SITE
from stepscope.trace.files import read_whole
from stepscope.trace.machine_profiles import read_profile

# A rate is measured if the GPU was among those fitted or if `calibrate` ran on it. Otherwise it
# follows from its peak, its watts and its generation (docs/records/gpus.md).

Closeness = Literal["chip", "generation", "far"]
_TENSOR = table("kernels.tensor_energy", dict[str, float])  # over bf16's
OLD_GENERATIONS = frozenset({"kepler", "maxwell", "pascal"})  # before libraries took today's form
_ORDER = ("kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell")
_SPLIT_CACHE = frozenset({"ampere", "hopper", "blackwell"})
_LEAST_WATTS = 0.2  # of a board's watts are left for arithmetic, however small it is
_LINE_BYTES = 64  # that a multiprocessor takes from the L2 cache per cycle


class GpuRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of gpus.json. `device` names a row of the device table, which has the rest."""

    gpu: str
    device: str = ""
    printed: tuple[str, ...] = ()
    vendor: str = ""
    tflops: dict[str, float] = {}
    bandwidth_gb_s: float = 0.0
    memory_gib: float = 0.0
    multiprocessors: int = 0
    link: str = ""
    link_gb_s: float = 0.0
    generation: str
    node_nm: int
    lanes: int  # fp32 units per multiprocessor
    boost_mhz: float
    l2_mb: float
    watts: float
    threads: int  # per multiprocessor
    memory: Literal["HBM", "GDDR"]


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU with the rates that large kernels reach."""

    name: str
    row: GpuRow
    rates: dict[str, float]  # dtype -> FLOP/s of long products of any sides
    full_rates: dict[str, float]  # the same at full clocks, if watts did not matter
    aligned: float = 1.0  # of the slowing by watts that fp32 products of even sides have
    bytes_s: float
    l2_bytes_s: float
    measured: frozenset[str]  # "memory" and dtypes whose rate was measured on such a GPU
    calibrated: bool = False
    profile: Profile | None = None

    def full_rate(self, dtype: str) -> float:
        return max(self.full_rates.get(dtype, 0.0), self.rates[dtype])

    def slowed_rate(self, dtype: str, power: float) -> float:
        """With a part of the slowing by watts: 0 is none, 1 that of long products alone."""
        full = self.full_rate(dtype)
        return float(full * (self.rates[dtype] / full) ** power)

    def model_rate(self, dtype: str) -> float:
        """Of the products of models, whose sides are multiples of 4."""
        return self.slowed_rate(dtype, self.aligned_power(dtype))

    def aligned_power(self, dtype: str) -> float:
        return self.aligned if unit_of(dtype) == "fp32" else 1.0

    @property
    def memory_bytes(self) -> float:
        return self.row.memory_gib * (1 << 30)

    @property
    def link_bytes_s(self) -> float:
        return self.row.link_gb_s * 1e9

    @property
    def multiprocessors(self) -> int:
        return self.row.multiprocessors

    @property
    def l2_bytes(self) -> float:
        return self.row.l2_mb * 1e6

    @property
    def near_l2_bytes(self) -> float:
        """What one multiprocessor can keep: A100 and its heirs copy lines into both halves."""
        halves = self.row.memory == "HBM" and self.row.generation in _SPLIT_CACHE
        return self.l2_bytes / 2 if halves else self.l2_bytes


@cache
def gpu_rows() -> tuple[GpuRow, ...]:
    text = Path(__file__).with_name("gpus.json").read_bytes()
    specs = {spec.name: spec for spec in DEVICES}
    rows = []
    for row in msgspec.json.decode(text, type=tuple[GpuRow, ...]):
        if spec := specs.get(row.device):
            row = replace(
                row,
                printed=(spec.name, *spec.printed),
                vendor=spec.vendor,
                tflops={dtype: rate / 1e12 for dtype, rate in spec.peaks.items()},
                bandwidth_gb_s=spec.bandwidth_bytes_s / 1e9,
                memory_gib=spec.memory_bytes / (1 << 30),
                multiprocessors=spec.multiprocessors,
                link=spec.link,
                link_gb_s=spec.link_bytes_s / 1e9,
            )
        rows.append(row)
    return tuple(rows)


def find_row(name: str) -> GpuRow | None:
    """By the key of the table or by a name as drivers print it."""
    wanted = plain_name(name)
    for row in gpu_rows():
        if wanted in {plain_name(row.gpu), *map(plain_name, row.printed)}:
            return row
    return None


def make_gpu(row: GpuRow, fit: TransferFit | None = None) -> Gpu:
    """Rates that were measured on such a GPU, else what its data sheet and generation suggest."""
    fit = fit or transfer_fit()
    own = fit.measured.get(row.gpu, {})
    rates = {
        dtype: 1e12 * tflops * (own.get(dtype) or expected_share(row, dtype, fit))
        for dtype, tflops in row.tflops.items()
        if dtype != "fp64"
    }
    full = {dtype: 1e12 * row.tflops[dtype] * _full_share(row, dtype, fit) for dtype in rates}
    memory = own.get("memory") or _memory_share(row, fit)
    return Gpu(
        name=row.gpu,
        row=row,
        rates=rates,
        full_rates=full,
        aligned=fit.power.aligned,
        bytes_s=1e9 * row.bandwidth_gb_s * memory,
        l2_bytes_s=fit.cache.rate_share * row.multiprocessors * row.boost_mhz * 1e6 * _LINE_BYTES,
        measured=frozenset(own),
    )


def with_profile(gpu: Gpu, profile: Profile) -> Gpu:
    """The same GPU with the rates that `calibrate` measured on it."""
    rates = {}
    for dtype, rate in (profile.matmul_flops | profile.sustained_flops).items():
        if dtype in gpu.rates:
            # `calibrate` multiplies large matrices, which run on the best tile, and whose sides are
            # powers of two.
            kind = "linear" if unit_of(dtype) == "fp32" else "tensor"
            aligned = rate / max(tile.share for tile in transfer_fit().products[kind].tiles)
            full = max(gpu.full_rates.get(dtype, 0.0), aligned)
            rates[dtype] = full * math.pow(aligned / full, 1 / gpu.aligned_power(dtype))
    measured = gpu.measured | set(rates) | ({"memory"} if profile.copy_bytes_s else set())
    return replace(
        gpu,
        rates=gpu.rates | rates,
        bytes_s=profile.copy_bytes_s or gpu.bytes_s,
        measured=frozenset(measured),
        calibrated=True,
        profile=profile,
    )


def expected_share(row: GpuRow, dtype: str, fit: TransferFit) -> float:
    """The share of the peak that large products reach, from watts and generation."""
    share = _full_share(row, dtype, fit)
    if row.vendor == "AMD":
        return share
    # Watts per TFLOP/s of its own generation and process, else of the nearest known one.
    unit, watts = unit_of(dtype), fit.power.watts_per_tflop
    known = {process: units[unit] for process, units in watts.items() if unit in units}
    nearest = min(known, key=lambda process: _apart(process, row))
    wanted = row.tflops[dtype] * known[nearest] * _TENSOR.get(dtype, 1.0)
    left = max(row.watts - fit.power.board_watts, _LEAST_WATTS * row.watts)
    return share * min(1.0, math.pow(left / wanted, fit.power.exponent))


def unit_of(dtype: str) -> str:
    return "fp32" if dtype == "fp32" else "tensor"


def _full_share(row: GpuRow, dtype: str, fit: TransferFit) -> float:
    """Where watts do not matter."""
    power, unit = fit.power, unit_of(dtype)
    if row.vendor == "AMD":
        return power.unit["amd"]
    narrow = unit == "tensor" or row.lanes < 128
    return power.unit[unit] * (1.0 if narrow else power.wide_lanes)


def process_name(row: GpuRow) -> str:
    """A generation may be made in two processes: "ampere 7nm"."""
    return f"{row.generation} {row.node_nm}nm"


def _apart(process: str, row: GpuRow) -> tuple[int, int]:
    generation, node = process.split()
    return generations_apart(generation, row.generation), abs(int(node[:-2]) - row.node_nm)


def _memory_share(row: GpuRow, fit: TransferFit) -> float:
    """Of the bandwidth: as measured GPUs with the same kind of memory reach, the nearest most."""
    total = weights = 0.0
    for other in gpu_rows():
        share = fit.measured.get(other.gpu, {}).get("memory")
        if share is None or other.memory != row.memory or other.gpu == row.gpu:
            continue
        weight = 1 / (0.5 + generations_apart(other.generation, row.generation)) ** 2
        if (other.generation in OLD_GENERATIONS) != (row.generation in OLD_GENERATIONS):
            weight /= 10
        total, weights = total + weight * share, weights + weight
    return total / weights if weights else 0.82


def generations_apart(one: str, other: str) -> int:
    """How many generations lie between two GPUs; those of other makers are far apart."""
    if one not in _ORDER or other not in _ORDER:
        return 0 if one == other else len(_ORDER)
    return abs(_ORDER.index(one) - _ORDER.index(other))


def closeness(one: GpuRow, other: GpuRow) -> Closeness:
    """One chip, two that libraries treat much alike, or two that have little in common."""
    if (one.generation, one.multiprocessors, one.lanes) == (
        other.generation,
        other.multiprocessors,
        other.lanes,
    ):
        return "chip"
    if one.vendor != other.vendor or {one.generation, other.generation} & OLD_GENERATIONS:
        return "far"
    return "generation"


# A GPU by its name, a short name such as H100, or a file about it.

_PAGE = f"{SITE}/reference/devices/"
_FILE_HELP = (
    "or give a file: what `stepscope calibrate` wrote on that GPU, or its data sheet as JSON "
    f"({_PAGE})"
)


def find_gpu(text: str) -> Gpu:
    """Raises UsageError with the nearest names for a GPU that is not in the table."""
    if row := find_row(text) or _by_short_name(text):
        return make_gpu(row)
    path = Path(text)
    if path.suffix == ".json" or path.exists():
        return read_gpu(path)
    names = [row.gpu for row in gpu_rows()]
    lower = {name.lower(): name for name in names}
    begins = [name for name in names if name.lower().startswith(text.lower())]
    near = begins[:3] or [lower[name] for name in get_close_matches(text.lower(), lower, 3, 0.4)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(names)};"
    raise UsageError(f"there is no GPU {text!r} in the table. {hint} {_FILE_HELP}")


def other_boards(text: str) -> tuple[str, ...]:
    """Boards that a short name could mean as well, such as the PCIe one for H100."""
    if find_row(text):
        return ()
    boards = _boards(text)
    chosen = _by_short_name(text)
    return tuple(row.gpu for row in boards if chosen and row.gpu != chosen.gpu)


def _boards(text: str) -> list[GpuRow]:
    start = f"{plain_name(text)} "
    return [row for row in gpu_rows() if start.strip() and plain_name(row.gpu).startswith(start)]


def _by_short_name(text: str) -> GpuRow | None:
    """The board with the fastest links, then the most memory, then the most watts."""
    boards = _boards(text)
    return max(boards, key=lambda row: (row.watts, row.memory_gib)) if boards else None


def read_gpu(path: Path) -> Gpu:
    """A calibration made on the GPU, or its data sheet."""
    try:
        body = msgspec.json.decode(read_whole(path), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UnreadableInputError(f"{path} is not a JSON object: {error}") from None
    if "matmul_flops" in body:
        profile = read_profile(path)
        known = find_row(profile.device)
        if known is None:
            raise UnreadableInputError(
                f"{path} was measured on {profile.device or 'a CPU'}, which is not in the table of "
                "GPUs"
            )
        return with_profile(make_gpu(known), profile)
    if "times" in body:
        raise UnreadableInputError(
            f"{path} holds operator times. Import them with `stepscope probe import "
            f"{path}`, then name the GPU"
        )
    try:
        row = msgspec.convert(body, GpuRow)
    except msgspec.ValidationError as error:
        raise UnreadableInputError(
            f"{path} does not describe a GPU: {error}. Its fields: {_PAGE}"
        ) from None
    base = find_row(row.device) if row.device else None
    if row.device and base is None:
        raise UnreadableInputError(f"{path}: there is no device {row.device!r} in the table")
    missing = [
        name
        for name in ("tflops", "bandwidth_gb_s", "memory_gib", "multiprocessors")
        if not getattr(row if base is None else base, name)
    ]
    numbers = (row.boost_mhz, row.l2_mb, row.watts, row.threads, row.lanes, *row.tflops.values())
    if missing or min(numbers) <= 0:
        what = f"{', '.join(missing)} missing" if missing else "every figure must be above 0"
        raise UnreadableInputError(f"{path} does not describe a GPU: {what}")
    return make_gpu(row if base is None else base)


# Numbers fitted to kernel times of other GPUs: data/other_gpu.json, a row for each field.
#
# They are shares, exponents and spreads; no measured time is among them. docs/records/gpus.md
# explains each.


class Tile(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a product that one block computes, and the share of the peak it reaches."""

    rows: int
    columns: int
    share: float


class ProductFit(msgspec.Struct, frozen=True, kw_only=True):
    """How matrix products of one kind use a GPU."""

    tiles: tuple[Tile, ...]
    wave: float  # 1: blocks run in whole waves; 0: the last wave costs only its own blocks
    inner: float  # what starting a block costs, as a length of the inner dimension
    split_share: float  # of the bandwidth, when the parts of a split product are added up
    overlap: float  # 1: arithmetic and memory add up; large: the longer one counts
    # Timed alone, kernels shorter than this end before a board that lacks watts lowers its clocks:
    # `calm_power` is the part of the slowing that the shortest have. 0: all alike.
    calm_ms: float = 0.0
    calm_power: float = 1.0
    aligned_power: float = 1.0  # PowerFit.aligned, where it counts
    # Timed alone, with so many copies of the matrices in turn: what of them fits the L2 cache moves
    # at the cache's rate. 0: nothing does.
    copies: int = 0
    start_cycles: float = 0.0


class CacheFit(msgspec.Struct, frozen=True, kw_only=True):
    rate_share: float  # of multiprocessors x clock x 64 bytes
    fits: float  # the share of the cache that one operator's tensors may fill and stay
    sharpness: float


class RowFit(msgspec.Struct, frozen=True, kw_only=True):
    """What one block takes for its row: clock cycles, memory aside, and room in the cache."""

    start_cycles: float
    step_cycles: float  # each time that its threads take their next elements
    rereads_fit: float  # the share of the cache that rows being read again may fill


class AttentionFit(msgspec.Struct, frozen=True, kw_only=True):
    share: float  # of what products reach
    start_cycles: float
    calm_ms: float  # kernels shorter than this hardly run into the limit of watts


class PowerFit(msgspec.Struct, frozen=True, kw_only=True):
    """rate = unit x lanes x peak x min(1, (left / (peak x watts per TFLOP/s)) ^ exponent), where
    what is left for arithmetic is watts - board_watts."""

    exponent: float
    board_watts: float  # that a board draws at full clocks without work
    # Of the slowing that long fp32 products have, for sides that are multiples of 4, as those of
    # models are: their vector loads take fewer instructions, so fewer watts.
    aligned: float
    unit: dict[str, float]  # kind of unit -> share of its peak at full clocks
    wide_lanes: float  # share left where 128 fp32 lanes share four schedulers
    # Watts per TFLOP/s at full clocks, by generation and kind of unit.
    watts_per_tflop: dict[str, dict[str, float]]
    estimated: tuple[str, ...]  # "generation unit" that no measured GPU shows


class TransferFit(msgspec.Struct, frozen=True, kw_only=True):
    products: dict[str, ProductFit]
    cache: CacheFit
    rows: dict[str, RowFit]  # softmax and norm
    power: PowerFit
    # GPU -> "memory" or a dtype -> achieved share of the peak, where measured.
    measured: dict[str, dict[str, float]]
    attention: AttentionFit
    # By closeness of two GPUs: how much of a kernel's own deviation from the model is kept.
    kept: dict[str, dict[str, float]]  # family -> closeness -> share
    # The host's time inside times taken with events, in milliseconds by operator.
    launch_ms: dict[str, float]
    hidden_launch: float  # the share of it that runs before the kernel can start
    # By operator and closeness: standard deviation of the logarithm of a predicted time.
    spread: dict[str, dict[str, float]]
    # The part of it that all kernels of one family share.
    common: float
    estimated: float  # added for a rate that no GPU of the generation shows
    # First word of a link -> share of its rate that all-reduces reach, by ranks ("2", "8"), and
    # "start_us", what the shortest one takes.
    link: dict[str, dict[str, float]]


@cache
def transfer_fit() -> TransferFit:
    prefix = "other_gpu."
    rows = read_fitted("other_gpu").values()
    values = {row.name.removeprefix(prefix): msgspec.json.decode(row.value) for row in rows}
    return msgspec.convert(values, TransferFit)
