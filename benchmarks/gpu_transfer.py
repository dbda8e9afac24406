"""How well kernel and step times carry over to a GPU that was left out of the fit.

    python benchmarks/gpu_transfer.py                  each GPU left out, by operator
    python benchmarks/gpu_transfer.py --generations    each generation left out
    python benchmarks/gpu_transfer.py --steps          whole steps, from operators of another GPU
    python benchmarks/gpu_transfer.py --quick          tiles not fitted again: seconds, not minutes

Reads ../shared/gpu_transfer; nothing of it is written anywhere. Beside the prediction stand two
baselines: the ratio of data-sheet rooflines, and the ratio of data-sheet FLOP/s.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

import gpu_tables
from fit_gpu_transfer import LEAST_MS, fit_all, fit_power, read_tables
from stepscope.predict.kernel_costs import ELEMENT_BYTES
from stepscope.predict.other_gpu import gpu as gpus
from stepscope.predict.other_gpu.gpu import transfer_fit
from stepscope.predict.other_gpu.kernel_time import (
    CONFIDENCE,
    find_operator,
    launch_doubt,
    retime_many,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from gpu_tables import OpTimes
    from stepscope.predict.other_gpu.gpu import TransferFit

    Floats = NDArray[np.float64]

GENERATIONS = {
    "Pascal": frozenset({"P4", "P100-PCIE-16GB"}),
    "Volta and Turing": frozenset({"V100-PCIE-32GB", "T4"}),
    "Ampere": frozenset({"A100-PCIE-40GB", "A100-PCIE-80GB", "A100-SXM4-80GB", "A40"}),
    "Ada": frozenset({"L40S"}),
    "Blackwell": frozenset({"B200", "RTX-PRO-6000"}),
}
_MOST = 1500  # rows per pair
Errors = dict[tuple[str, str, str], list[tuple["Floats", "Floats", "Floats", "Floats"]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--generations", action="store_true")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if not gpu_tables.FOLDER.is_dir():
        print(f"no tables here: {gpu_tables.FOLDER}", file=sys.stderr)
        return 4
    if options.steps:
        from gpu_transfer_steps import print_steps

        print_steps(lambda gpu: fit_without(frozenset({gpu}), quick=options.quick), transfer_fit())
        return 0
    tables = tuple(read_tables(frozenset()))
    if options.generations:
        groups: Iterable[frozenset[str]] = GENERATIONS.values()
    else:
        groups = [frozenset({gpu}) for group in GENERATIONS.values() for gpu in sorted(group)]
    errors: Errors = defaultdict(list)
    for group in groups:
        fit = fit_without(group, quick=options.quick)
        for target in sorted(group):
            judge(tables, target, group, fit, errors)
    print_errors(errors)
    return 0


def fit_without(left_out: frozenset[str], *, quick: bool) -> TransferFit:
    if not quick:
        return fit_all(left_out, sample=250)
    fit = transfer_fit()
    rest = {gpu: own for gpu, own in fit.measured.items() if gpu not in left_out}
    fit = replace(fit, measured=rest)
    return replace(fit, power=fit_power(fit))


def judge(
    tables: Sequence[OpTimes],
    target: str,
    left_out: frozenset[str],
    fit: TransferFit,
    errors: Errors,
) -> None:
    """Every operator that the target and a GPU of the fit both ran."""
    for table in tables:
        known = find_operator(table.op)
        for source in table.gpus:
            if source in left_out or target not in table.gpus or source == target:
                continue
            shapes, before, after = table.on_both(source, target)
            chosen = np.random.default_rng(2).permutation(len(after))[:_MOST]
            if not len(chosen):
                continue
            shapes, before, after = shapes[chosen], before[chosen], after[chosen]
            one, other = (gpus.make_gpu(_row(gpu), fit) for gpu in (source, target))
            launch = fit.launch_ms.get(known.family, 0.0) if table.dtype == "fp32" else 0.0
            times = retime_many(
                known,
                shapes,
                table.dtype,
                before,
                one,
                other,
                launch_ms=launch,
                alone=True,
                fit=fit,
            )
            roof, flops = baselines(table, shapes, one.row, other.row)
            spread = fit.spread[known.family_in(table.dtype)][gpus.closeness(one.row, other.row)]
            name = f"{known.family} {table.dtype}"
            doubt = np.hypot(spread, launch_doubt(launch, times))
            inside = np.abs(np.log(times / after)) <= CONFIDENCE * doubt
            for size, rows in (("long", after >= LEAST_MS), ("short", after < LEAST_MS)):
                if rows.any():
                    errors[name, target, size].append(
                        (
                            times[rows] / after[rows] - 1,
                            before[rows] * roof[rows] / after[rows] - 1,
                            before[rows] * flops / after[rows] - 1,
                            inside[rows],
                        )
                    )


def _row(gpu: str) -> gpus.GpuRow:
    row = gpus.find_row(gpu)
    assert row is not None, gpu
    return row


def baselines(
    table: OpTimes, shapes: Floats, one: gpus.GpuRow, other: gpus.GpuRow
) -> tuple[Floats, float]:
    """The ratio of data-sheet rooflines, and of data-sheet FLOP/s."""
    peak = one.tflops.get(table.dtype, 1.0), other.tflops.get(table.dtype, 1.0)
    speed = peak[0] / peak[1]
    width = one.bandwidth_gb_s / other.bandwidth_gb_s
    if find_operator(table.op).columns != 4:
        compute = table.op in ("conv", "attention")
        return np.full(len(shapes), speed if compute else width), speed
    batch, m, n, k = shapes.T
    size = ELEMENT_BYTES[table.dtype]
    flops = 2 * batch * m * n * k / 1e12
    moved = size * batch * (m * k + n * k + m * n) / 1e9

    def roof(row: gpus.GpuRow) -> Floats:
        time: Floats = np.maximum(flops / row.tflops[table.dtype], moved / row.bandwidth_gb_s)
        return time

    return roof(other) / roof(one), speed


def print_errors(errors: Errors) -> None:
    print(
        "| operator | left out | rows | mean | median | p90 | sign "
        "| roofline ratio | FLOP ratio | inside 90% |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for size in ("long", "short"):
        for name in sorted({name for name, _, of in errors if of == size}):
            targets = [target for one, target, of in errors if (one, of) == (name, size)]
            for target in dict.fromkeys(targets):
                print(_line(f"{name}, {_size(size)}", target, errors[name, target, size]))
            both = [
                part for target in dict.fromkeys(targets) for part in errors[name, target, size]
            ]
            print(_line(f"**{name}, {_size(size)}**", "all", both))


def _size(size: str) -> str:
    return "0.1 ms or more" if size == "long" else "under 0.1 ms"


def _line(name: str, target: str, parts: Sequence[tuple[Floats, Floats, Floats, Floats]]) -> str:
    ours, roof, flops, inside = (np.concatenate(column) for column in zip(*parts, strict=True))
    cells = [
        name,
        target,
        f"{len(ours):,}",
        f"{np.abs(ours).mean():.1%}",
        f"{np.median(np.abs(ours)):.1%}",
        f"{np.quantile(np.abs(ours), 0.9):.1%}",
        f"{np.median(ours):+.1%}",
        f"{np.abs(roof).mean():.0%}",
        f"{np.abs(flops).mean():.0%}",
        f"{inside.mean():.0%}",
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
