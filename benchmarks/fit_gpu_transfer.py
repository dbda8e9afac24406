"""Fit how kernels use a GPU to times that others measured, and write the few numbers that result.

    python benchmarks/fit_gpu_transfer.py            writes predict/data/other_gpu.json
    python benchmarks/fit_gpu_transfer.py --print    prints it instead

The tables are read from ../shared/gpu_transfer and never copied. Rates of GPUs that the tables lack
follow from watts and generation; the figures that no table shows are in ESTIMATED_WATTS.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace
from scipy.optimize import minimize

import gpu_tables
from fit_gpu_rows import FIRST_ROWS, fit_rows
from fitted_rows import write_values
from gpu_tables import BF16_GPUS, FP32_GPUS, TWO_INPUTS
from stepscope.predict.other_gpu import gpu as gpus
from stepscope.predict.other_gpu import kernel_time
from stepscope.predict.other_gpu.gpu import (
    AttentionFit,
    CacheFit,
    PowerFit,
    ProductFit,
    Tile,
    TransferFit,
)
from stepscope.predict.other_gpu.kernel_time import (
    CONFIDENCE,
    ModelledOperator,
    bmm_kind,
    find_operator,
    retime_many,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from gpu_tables import OpTimes

    Floats = NDArray[np.float64]

LEAST_MS = 0.1  # shorter times with the host's launch in them say more of the host
SHORTEST_MS = 0.01  # of times without a launch in them
HIDDEN_LAUNCH = 0.6  # by eye: a time is max(launch, 0.6 launch + kernel)
MODERN = ("V100-PCIE-32GB", "T4", "A100-PCIE-40GB", "A100-PCIE-80GB")  # kernels of today's kind
CLOSENESS = ("chip", "generation", "far")
_SIZES = ((256, 128), (128, 128), (128, 64), (64, 128), (64, 64), (32, 128), (128, 32), (32, 32))
_SHARES = (0, 1, 2, 2, 3, 4, 4, 5)  # a tile and its transpose share one number
_BMM_SIZES = {"bmm": _SIZES[1:2], "bmm before ampere": _SIZES[2:]}
_SAMPLE = 400  # rows per GPU
_RATES = 10  # numbers of a product before the GPUs' own rates
# Watts per TFLOP/s at full clocks for processes of which no table has a GPU held back by watts.
# fp32: from the power of boards of that process at their boost clock, times the factor by which T4
# and P4 fall short of the same estimate. tensor: between the generations before and after.
ESTIMATED_WATTS = {
    "kepler 28nm": {"fp32": 36.0},
    "maxwell 28nm": {"fp32": 32.0},
    "pascal 16nm": {"fp32": 22.5, "tensor": 11.0},
    "volta 12nm": {"fp32": 15.5, "tensor": 1.8},
    "turing 12nm": {"fp32": 23.5, "tensor": 1.7},
    "ampere 7nm": {"fp32": 15.5, "tensor": 1.3},
    "ampere 8nm": {"fp32": 9.3, "tensor": 1.5},
    "ada 4nm": {"fp32": 6.1, "tensor": 1.3},
    "hopper 4nm": {"fp32": 6.2, "tensor": 0.92},
    "blackwell 4nm": {"fp32": 5.7, "tensor": 0.77},
}
# 128 fp32 lanes take every issue slot of their four schedulers, so loads and address arithmetic
# take their share from the products; 64 lanes leave every other slot free.
WIDE_LANES = 0.82
# By eye, on times of large tensors by their columns.
CACHE = CacheFit(
    rate_share=0.32,
    fits=0.8,
    sharpness=3.0,
)
# By eye, on times of one kernel on three GPUs.
ATTENTION = AttentionFit(share=0.6, start_cycles=7000.0, calm_ms=0.1)
POWER_EXPONENT = 0.6  # clocks fall more slowly than watts: 0.56 and 0.64 between boards of one chip
# By eye, on T4 and P4: products timed alone take a quarter less than long ones suggest below 1 ms.
CALM_MS, CALM_POWER = 2.0, 0.3
COPIES = 6  # of the matrices, in turn: how the bf16 tables were measured
START_CYCLES = 3000.0  # by eye, on the shortest products of the bf16 tables
# Data-centre boards report about as much at full clocks while no kernel runs. T4 and P4 have 70 W.
BOARD_WATTS = 25.0
HELD_BACK = 0.93  # of the best share: boards nearer to it are not short of watts
# By eye, on T4's long products and on whole steps.
ALIGNED_POWER = 0.7
ABOVE_BEST = 1.03
LEAST_SPREAD = 0.04  # two boards of one chip differ by as much
FEW_GPUS = 1.15  # a spread seen on six GPUs is too narrow for the seventh
EXPECTED_LINKS = {"NVLink": 0.75, "PCIe": 0.55, "Infinity": 0.6}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--print", action="store_true", dest="show")
    options = parser.parse_args()
    if not gpu_tables.FOLDER.is_dir():
        print(f"no tables here: {gpu_tables.FOLDER}", file=sys.stderr)
        return 4
    values = {f"other_gpu.{name}": value for name, value in rounded(fit_all()).items()}
    if options.show:
        print(json.dumps(values, indent=1))
    else:
        write_values(values)
    return 0


def fit_all(left_out: frozenset[str] = frozenset(), sample: int = _SAMPLE) -> TransferFit:
    """All numbers, without the times of some GPUs."""
    tables = tuple(read_tables(left_out))
    fit = first_guess(tables, left_out)
    fit = fit_rows(fit, tables)
    fit = fit_products(fit, tables, left_out, sample)
    fit = replace(fit, power=fit_power(fit))
    return fit_spread(fit, tables)


def read_tables(left_out: frozenset[str]) -> Iterator[OpTimes]:
    tables = [*gpu_tables.matmul_fp32().values(), *gpu_tables.elementwise_fp32().values()]
    tables += [gpu_tables.conv_fp32(), gpu_tables.wide_matmul("bf16")]
    tables += list(gpu_tables.attention_bf16().values())
    for table in tables:
        times = {
            shape: {gpu: ms for gpu, ms in one.items() if gpu not in left_out}
            for shape, one in table.times.items()
        }
        yield table._replace(times=times)


def table_named(tables: Sequence[OpTimes], op: str, dtype: str) -> OpTimes:
    return next(table for table in tables if (table.op, table.dtype) == (op, dtype))


def first_guess(tables: Sequence[OpTimes], left_out: frozenset[str]) -> TransferFit:
    launch = fit_launches(tables)
    return TransferFit(
        products={},
        cache=CACHE,
        rows=FIRST_ROWS,
        power=PowerFit(
            exponent=POWER_EXPONENT,
            board_watts=BOARD_WATTS,
            aligned=ALIGNED_POWER,
            unit={"fp32": 0.98, "tensor": 1.04, "amd": 0.66},
            wide_lanes=WIDE_LANES,
            watts_per_tflop=ESTIMATED_WATTS,
            estimated=(),
        ),
        measured=fit_bandwidths(tables, launch, left_out),
        attention=ATTENTION,
        kept={},
        launch_ms=launch,
        hidden_launch=HIDDEN_LAUNCH,
        spread={},
        common=1.0,
        estimated=0.12,
        link=fit_links(left_out),
    )


def fit_launches(tables: Sequence[OpTimes]) -> dict[str, float]:
    """The shortest fp32 times of each machine, their median, by family."""
    shortest: dict[str, list[float]] = {}
    for table in tables:
        if table.dtype != "fp32":
            continue
        for gpu in table.gpus:
            _, ms = table.on(gpu)
            if len(ms) > 1200 and table.op != "conv":  # whose rows are all long
                family = find_operator(table.op).family
                shortest.setdefault(family, []).append(float(np.quantile(ms, 0.005)))
    launch = {family: float(np.median(times)) for family, times in shortest.items()}
    return launch | {"conv": launch["bmm"]}


def fit_bandwidths(
    tables: Sequence[OpTimes], launch: dict[str, float], left_out: frozenset[str]
) -> dict[str, dict[str, float]]:
    """The share of the bandwidth that large tensors move at."""
    shares: dict[str, list[float]] = {}
    for table in tables:
        tensors = 3 if table.op in TWO_INPUTS else 2
        if find_operator(table.op).family != "elementwise":
            continue
        for gpu in table.gpus:
            shape, ms = table.on(gpu)
            moved = 4 * tensors * shape.prod(axis=1)
            large = moved > 3e8
            rate = moved[large] / (ms[large] - HIDDEN_LAUNCH * launch["elementwise"]) / 1e6
            row = gpus.find_row(gpu)
            if row and large.any():
                shares.setdefault(gpu, []).append(float(np.median(rate)) / row.bandwidth_gb_s)
    measured = {gpu: {"memory": float(np.median(found))} for gpu, found in shares.items()}
    return measured | _bandwidths_of_products(tables, measured, left_out)


def _bandwidths_of_products(
    tables: Sequence[OpTimes], known: dict[str, dict[str, float]], left_out: frozenset[str]
) -> dict[str, dict[str, float]]:
    """Products of few rows by a large matrix only read it.

    Scaled to what elementwise kernels reach on the one chip that both tables have.
    """
    table = table_named(tables, "linear", "bf16")
    best = {}
    for gpu in table.gpus:
        shape, ms = table.on(gpu)
        _, m, n, k = shape.T
        moved = 2 * (m * k + n * k + m * n)
        large = (m <= 16) & (moved > 1.5e8)
        row = gpus.find_row(gpu)
        if row:
            rate = np.quantile(moved[large] / ms[large], 0.9) / 1e6
            best[gpu] = float(rate) / row.bandwidth_gb_s
    reference = known.get("A100-PCIE-80GB") or known.get("A100-PCIE-40GB") or {"memory": 0.86}
    scale = reference["memory"] / best.get("A100-SXM4-80GB", 0.833)
    shares = {gpu: {"memory": share * scale} for gpu, share in best.items()}
    added = gpu_tables.layers_fp16()["add"]
    if "A40" not in left_out:
        shape, ms = added.on("A40")
        moved = 6 * shape[:, 0] * shape[:, 1]
        rate = float(np.median(moved[moved > 1e8] / ms[moved > 1e8])) / 1e6
        shares["A40"] = {"memory": rate / 696}
    return shares


def fit_products(
    fit: TransferFit, tables: Sequence[OpTimes], left_out: frozenset[str], sample: int
) -> TransferFit:
    """Tiles, waves and overlap; each GPU's rate comes with them."""
    products, measured = dict(fit.products), {gpu: dict(own) for gpu, own in fit.measured.items()}
    rates: dict[str, dict[str, float]] = {}
    for kind, dtype, machines in (("linear", "fp32", MODERN), ("tensor", "bf16", BF16_GPUS)):
        table = table_named(tables, "linear", dtype)
        chosen = [gpu for gpu in machines if gpu not in left_out]
        products[kind], rates[kind] = _fit_product(fit, table, dtype, chosen, sample)
        if dtype == "fp32":
            older = [gpu for gpu in FP32_GPUS if gpu not in {*machines, *left_out}]
            for gpu in older:
                rates[kind][gpu] = _fit_rate(fit, table, gpu, products[kind], sample)
    for kind, dtype in (("linear", "fp32"), ("tensor", "bf16")):
        for gpu, share in rates[kind].items():
            measured[gpu][dtype] = share
            if dtype == "bf16":
                measured[gpu]["fp16"] = share
    fit = replace(fit, products=products, measured=measured)
    return replace(fit, products=products | _fit_bmm(fit, tables, left_out, sample))


def _fit_bmm(
    fit: TransferFit, tables: Sequence[OpTimes], left_out: frozenset[str], sample: int
) -> dict[str, ProductFit]:
    """Batched products by the library's kernels, which changed with Ampere."""
    table = table_named(tables, "bmm", "fp32")
    fits: dict[str, ProductFit] = {}
    for kind, sizes in _BMM_SIZES.items():
        chosen = [gpu for gpu in MODERN if gpu not in left_out and bmm_kind(_row(gpu)) == kind]
        if not chosen:
            continue
        rates = {gpu: fit.measured[gpu]["fp32"] for gpu in chosen}
        fits[kind], _ = _fit_product(fit, table, "fp32", chosen, sample, sizes, rates)
    return dict.fromkeys(_BMM_SIZES, next(iter(fits.values()))) | fits


def _fit_product(
    fit: TransferFit,
    table: OpTimes,
    dtype: str,
    chosen: Sequence[str],
    sample: int,
    sizes: Sequence[tuple[int, int]] = _SIZES,
    rates: dict[str, float] | None = None,
) -> tuple[ProductFit, dict[str, float]]:
    """With each GPU's rate, or with known rates and one number more: the best tile's share."""
    launch = fit.launch_ms.get(table.op, 0.0) if dtype == "fp32" else 0.0
    data = {gpu: _sample(table, gpu, LEAST_MS if launch else SHORTEST_MS, sample) for gpu in chosen}
    models = {gpu: _bare_gpu(fit, gpu) for gpu in chosen}

    def read(numbers: Floats) -> tuple[ProductFit, list[float]]:
        how = _read_product(numbers, sizes, replayed=not launch)
        own = np.exp(numbers[_RATES:]).tolist()
        if rates is None:
            return how, own
        tiles = tuple(replace(tile, share=tile.share * own[0]) for tile in how.tiles)
        return replace(how, tiles=tiles), [rates[gpu] for gpu in chosen]

    def loss(numbers: Floats) -> float:
        how, own = read(numbers)
        total = 0.0
        for gpu, share in zip(chosen, own, strict=True):
            shapes, ms = data[gpu]
            rate = share * 1e12 * models[gpu].row.tflops[dtype]
            errors = np.log(_timed(shapes, rate, dtype, models[gpu], how, launch, fit) / ms)
            total += float(np.mean(np.sqrt(errors**2 + 0.01)))
        # Numbers far out mean "never" or "always": keep them where a small change still counts.
        return total / len(chosen) + 0.002 * float(
            (np.maximum(0, np.abs(numbers[:_RATES]) - 4) ** 2).sum()
        )

    start = [2.5, 2.5, 1.5, 1.0, 0.0, -1.0, 0.0, math.log(16), 0.0, 1.0]
    numbers = np.array(start + ([-0.2] * len(chosen) if rates is None else [0.0]))
    for _ in range(3):
        options = {"maxiter": 2, "maxfev": 1500}
        numbers = minimize(loss, numbers, method="Powell", options=options).x
    how, own = read(numbers)
    return how, dict(zip(chosen, own, strict=True))


def _read_product(
    numbers: Floats, sizes: Sequence[tuple[int, int]], *, replayed: bool
) -> ProductFit:
    """`replayed`: the bf16 tables, timed without launches and with copies of the matrices."""
    shares = 1 / (1 + np.exp(-np.asarray(numbers[:9])))
    return ProductFit(
        tiles=tuple(
            Tile(rows=rows, columns=columns, share=float(shares[number]))
            for (rows, columns), number in zip(_SIZES, _SHARES, strict=True)
            if (rows, columns) in sizes
        ),
        wave=float(shares[6]),
        inner=float(np.exp(numbers[7])),
        split_share=float(shares[8]),
        overlap=float(1 + np.exp(numbers[9])),
        calm_ms=0.0 if replayed else CALM_MS,
        calm_power=1.0 if replayed else CALM_POWER,
        aligned_power=1.0 if replayed else ALIGNED_POWER,
        copies=COPIES if replayed else 0,
        start_cycles=START_CYCLES if replayed else 0.0,
    )


def _fit_rate(fit: TransferFit, table: OpTimes, gpu: str, how: ProductFit, sample: int) -> float:
    """The rate alone, with tiles as they are on other GPUs."""
    shapes, ms = _sample(table, gpu, LEAST_MS, sample)
    model, launch = _bare_gpu(fit, gpu), fit.launch_ms[table.op]
    tried = np.linspace(0.3, 1.1, 41)
    peak = 1e12 * model.row.tflops["fp32"]
    errors = [
        np.abs(np.log(_timed(shapes, share * peak, "fp32", model, how, launch, fit) / ms)).mean()
        for share in tried
    ]
    return float(tried[int(np.argmin(errors))])


def _timed(
    shapes: Floats,
    rate: float,
    dtype: str,
    gpu: gpus.Gpu,
    how: ProductFit,
    launch: float,
    fit: TransferFit,
) -> Floats:
    size = 4 if dtype == "fp32" else 2
    reached = kernel_time.DtypeRate(rate, max(rate, gpu.full_rates[dtype]), size)
    kernel = kernel_time.product_ms(shapes, reached, gpu, how, fit)
    return np.maximum(launch, HIDDEN_LAUNCH * launch + kernel)


def _sample(table: OpTimes, gpu: str, least_ms: float, count: int) -> tuple[Floats, Floats]:
    shapes, ms = table.on(gpu, least_ms)
    chosen = np.random.default_rng(0).permutation(len(ms))[:count]
    return shapes[chosen], ms[chosen]


def _row(name: str) -> gpus.GpuRow:
    row = gpus.find_row(name)
    assert row is not None, name
    return row


def _bare_gpu(fit: TransferFit, name: str) -> gpus.Gpu:
    return gpus.make_gpu(_row(name), fit)


def fit_power(fit: TransferFit) -> PowerFit:
    """Watts per TFLOP/s, from measured GPUs that watts hold back; estimates for the rest.

    A unit's share at full clocks is a little above the best one measured.
    """
    units = {"amd": fit.power.unit["amd"]}
    for unit, dtype in (("fp32", "fp32"), ("tensor", "bf16")):
        shares = [own[dtype] for own in fit.measured.values() if dtype in own]
        units[unit] = ABOVE_BEST * max(shares)
    power = replace(fit.power, unit=units)
    logs: dict[tuple[str, str], list[float]] = {}
    for gpu, own in fit.measured.items():
        row = gpus.find_row(gpu)
        for dtype in ("fp32", "bf16"):
            if row is None or dtype not in own or row.generation == "pascal":
                continue
            unit = gpus.unit_of(dtype)
            full = power.unit[unit] * (
                power.wide_lanes if unit == "fp32" and row.lanes >= 128 else 1
            )
            slowed = own[dtype] / full
            if slowed < HELD_BACK:
                left = row.watts - power.board_watts
                watts = left / slowed ** (1 / power.exponent) / row.tflops[dtype]
                logs.setdefault((gpus.process_name(row), unit), []).append(math.log(watts))
    watts_by_process = {process: dict(units) for process, units in ESTIMATED_WATTS.items()}
    for (process, unit), found in logs.items():
        watts_by_process[process][unit] = math.exp(float(np.mean(found)))
    shown = {
        (gpus.process_name(row), gpus.unit_of(dtype))
        for gpu, own in fit.measured.items()
        for dtype in own
        if dtype != "memory" and (row := gpus.find_row(gpu)) is not None
    }
    estimated = [
        f"{process} {unit}"
        for process, units in watts_by_process.items()
        for unit in units
        if (process, unit) not in shown
    ]
    return replace(power, watts_per_tflop=watts_by_process, estimated=tuple(estimated))


def without(fit: TransferFit, gpu: str) -> TransferFit:
    """What would be known of a GPU if nobody had measured it."""
    rest = replace(fit, measured={one: own for one, own in fit.measured.items() if one != gpu})
    return replace(rest, power=fit_power(rest))


def cases(
    tables: Sequence[OpTimes], count: int = 400
) -> Iterator[tuple[OpTimes, ModelledOperator, str, str, Floats, Floats, Floats]]:
    """Every pair of GPUs that ran the same shapes."""
    for table in tables:
        known = find_operator(table.op)
        for source in table.gpus:
            for target in table.gpus:
                if source == target:
                    continue
                shapes, before, after = table.on_both(source, target)
                counted = after >= (LEAST_MS if table.dtype == "fp32" else SHORTEST_MS)
                shapes, before, after = shapes[counted], before[counted], after[counted]
                chosen = np.random.default_rng(1).permutation(len(after))[:count]
                if len(chosen) >= 20:
                    yield (
                        table,
                        known,
                        source,
                        target,
                        shapes[chosen],
                        before[chosen],
                        after[chosen],
                    )


def fit_spread(fit: TransferFit, tables: Sequence[OpTimes]) -> TransferFit:
    """How much of a kernel's own deviation to keep, and what error is left, each target unseen."""
    tries = (0.25, 0.5, 0.75, 1.0)  # a measured time always counts
    errors: dict[tuple[str, str], dict[float, list[Floats]]] = {}
    blind = {gpu: without(fit, gpu) for table in tables for gpu in table.gpus}
    for table, known, source, target, shapes, before, after in cases(tables):
        seen, unseen = _bare_gpu(fit, source), _bare_gpu(blind[target], target)
        close, family = gpus.closeness(seen.row, unseen.row), known.family_in(table.dtype)
        # One chip runs the same kernels: what is odd about one is odd on every board of it.
        for kept in (1.0,) if close == "chip" else tries:
            trial = replace(blind[target], kept={family: dict.fromkeys(CLOSENESS, kept)})
            launch = fit.launch_ms.get(family, 0.0) if table.dtype == "fp32" else 0.0
            times = retime_many(
                known,
                shapes,
                table.dtype,
                before,
                seen,
                unseen,
                launch_ms=launch,
                alone=True,
                fit=trial,
            )
            error = np.log(times / after)
            errors.setdefault((family, close), {}).setdefault(kept, []).append(error)
    kept_by: dict[str, dict[str, float]] = {}
    spread_by: dict[str, dict[str, float]] = {}
    for (family, close), by_kept in errors.items():
        mean = {kept: np.mean([np.abs(e).mean() for e in found]) for kept, found in by_kept.items()}
        best = min(mean, key=lambda kept: mean[kept])
        pooled = np.abs(np.concatenate(by_kept[best]))
        kept_by.setdefault(family, {})[close] = best
        spread = float(np.quantile(pooled, 0.9)) / CONFIDENCE
        spread_by.setdefault(family, {})[close] = max(LEAST_SPREAD, FEW_GPUS * spread)
    for family in kept_by:
        _fill(kept_by[family], {"chip": 1.0, "generation": 0.5, "far": 0.25})
        _fill(spread_by[family], {"chip": 0.08, "generation": 0.2, "far": 0.35})
    return replace(fit, kept=kept_by, spread=spread_by)


def _fill(known: dict[str, float], usual: dict[str, float]) -> None:
    for close, value in usual.items():
        known.setdefault(close, value)


def fit_links(left_out: frozenset[str]) -> dict[str, dict[str, float]]:
    """All-reduces inside a machine: share of the link's rate by ranks, and shortest time."""
    shares: dict[tuple[str, str], list[float]] = {}
    shortest: dict[str, list[float]] = {}
    for row in gpu_tables.rows("collectives.csv.gz"):
        gpu = gpus.find_row(row["gpu"])
        if gpu is None or row["gpu"] in left_out or row["op"] != "all_reduce":
            continue
        ranks, ms = int(row["n_gpus"]), float(row["ms"])
        if ranks > 4 and gpu.link.startswith("PCIe"):
            continue  # one machine whose eight GPUs hang on two processors: not typical
        size = int(row["elements"]) * (2 if row["dtype"] == "half" else 1)
        kind = gpu.link.split()[0]
        if size > 3e7:
            rate = 2 * (ranks - 1) / ranks * size / ms / 1e6
            shares.setdefault((kind, row["n_gpus"]), []).append(rate / (gpu.link_gb_s / 2))
        elif size < 1e5:
            shortest.setdefault(kind, []).append(1e3 * ms)
    links = {kind: {"2": share, "start_us": 15.0} for kind, share in EXPECTED_LINKS.items()}
    for (kind, ranks_text), found in shares.items():
        links[kind][ranks_text] = float(np.median(found))
    for kind, times in shortest.items():
        links[kind]["start_us"] = float(np.median(times))
    return links


def rounded(fit: TransferFit) -> dict[str, object]:
    """Three significant digits: more would be noise."""

    def shorten(value: object) -> object:
        if isinstance(value, dict):
            return {key: shorten(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [shorten(one) for one in value]
        return float(f"{value:.3g}") if isinstance(value, float) else value

    return {key: shorten(value) for key, value in msgspec.to_builtins(fit).items()}


if __name__ == "__main__":
    sys.exit(main())
