"""GPUs as predictions need them: data sheets, and the rates that kernels reach on them.

A rate is measured if the GPU was among those fitted or if `calibrate` ran on it. Otherwise it
follows from its peak, its watts and its generation (docs/records/gpus.md).
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec.structs import replace

from stepscope.predict.other_gpu.fitted import transfer_fit
from stepscope.records.devices import DEVICES, plain_name

if TYPE_CHECKING:
    from stepscope.predict.other_gpu.fitted import PowerFit, TransferFit
    from stepscope.records.profile import Profile

Closeness = Literal["chip", "generation", "far"]
_TENSOR = {"tf32": 2.0, "fp16": 1.0, "bf16": 1.0, "fp8": 0.5, "int8": 0.5}  # energy over bf16's
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
    return tuple(map(_with_device, msgspec.json.decode(text, type=tuple[GpuRow, ...])))


def _with_device(row: GpuRow) -> GpuRow:
    if not row.device:
        return row
    spec = next(spec for spec in DEVICES if spec.name == row.device)
    return replace(
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
    rates = {
        dtype: _any_sides(gpu, dtype, rate / _best_tile(dtype))
        for dtype, rate in (profile.matmul_flops | profile.sustained_flops).items()
        if dtype in gpu.rates
    }
    measured = gpu.measured | set(rates) | ({"memory"} if profile.copy_bytes_s else set())
    return replace(
        gpu,
        rates=gpu.rates | rates,
        bytes_s=profile.copy_bytes_s or gpu.bytes_s,
        measured=frozenset(measured),
        calibrated=True,
        profile=profile,
    )


def _any_sides(gpu: Gpu, dtype: str, aligned_rate: float) -> float:
    """`calibrate` multiplies matrices whose sides are powers of two."""
    full = max(gpu.full_rates.get(dtype, 0.0), aligned_rate)
    return full * math.pow(aligned_rate / full, 1 / gpu.aligned_power(dtype))


def _best_tile(dtype: str) -> float:
    """Large products, which `calibrate` measures, run on the best tile."""
    kind = "linear" if unit_of(dtype) == "fp32" else "tensor"
    return max(tile.share for tile in transfer_fit().products[kind].tiles)


def expected_share(row: GpuRow, dtype: str, fit: TransferFit) -> float:
    """The share of the peak that large products reach, from watts and generation."""
    share = _full_share(row, dtype, fit)
    if row.vendor == "AMD":
        return share
    wanted = row.tflops[dtype] * _watts_per_tflop(row, unit_of(dtype), fit.power)
    wanted *= _TENSOR.get(dtype, 1.0)
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


def _watts_per_tflop(row: GpuRow, unit: str, power: PowerFit) -> float:
    """Of its own generation and process, else of the nearest known one."""
    known = {one: units[unit] for one, units in power.watts_per_tflop.items() if unit in units}
    nearest = min(known, key=lambda one: _apart(one, row))
    return known[nearest]


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
