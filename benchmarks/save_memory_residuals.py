"""How far save_memory's promises are from what happens: the spread that they are printed with.

    python benchmarks/save_memory_residuals.py --save residuals.json [--seconds 300] [--tiny]
    python benchmarks/save_memory_residuals.py --save residuals.json --print

Each training is planned with `dry_run`, then trained with that plan in turns with plain training.
A step's residual is measured over promised, both as a factor of a plain step, so that a machine
that is busier later does not count; on a CPU all clocks are this thread's own time. The peak's is
that of the whole step on a GPU; on a CPU, where torch keeps no account, that of what backward keeps
when it begins, counted. fix/saved/step_promise.py has the quantiles of these rows.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.append(str(Path(__file__).parent.parent / "src"))

from library_turn import shared_turns
from save_memory_models import WARM_UP, WORKLOADS, Changed, as_it_is, build, ours
from save_memory_rows import measure_rows, saved_rows
from save_memory_table import clean, peak, reset_peak, timed, wait
from stepscope.fix import save_memory

if TYPE_CHECKING:
    from save_memory_rows import Row

TARGETS: dict[str, dict[str, float]] = {
    "15%": {"max_slowdown": 0.15},
    "least": {},
    "a third less": {"reduce": 0.33},
    "5%": {"max_slowdown": 0.05},
}
# Beside those of the table; they train one model each.
MORE = (
    *("transformer", "mobilenet-v3-large", "deep-speech-2", "nmt-lstm", "pointnet-cls"),
    *("pointnet-seg", "bert-medium", "moe", "ncf"),
)
_ROUNDS, _TINY_ROUNDS = 10, 8
_TAILS = 0.05  # of the rows, on either side


def main() -> None:
    options = _options()
    rows = saved_rows(options.save) if options.print else _measure_all(options)
    print(summary(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="start no row after this")
    parser.add_argument("--models", default="", help="separated by commas")
    parser.add_argument("--tiny", action="store_true", help="small models, also on a CPU")
    parser.add_argument("--save", type=Path, help="JSON; read first, written after every row")
    parser.add_argument("--print", action="store_true", help="measure nothing")
    return parser.parse_args()


def _measure_all(options: argparse.Namespace) -> list[Row]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        _count_own_time()
    models = [name for name in options.models.split(",") if name]
    # Their batches are set for a large GPU in WORKLOADS only.
    models = models or [*WORKLOADS, *(MORE if options.tiny else ())]
    turns = shared_turns()
    alone = turns.alone if turns is not None else contextlib.nullcontext

    def measured(cell: Row) -> Row:
        try:
            return _residual(cell["model"], TARGETS[cell["target"]], device, alone, options.tiny)
        finally:
            clean(device)

    cells = (
        {"model": model, "target": target, "device": device.type}
        for target in TARGETS
        for model in models
    )
    return measure_rows(cells, measured, path=options.save, seconds=options.seconds)


def _count_own_time() -> None:
    """On a CPU that others use, too, the clock on the wall says little about the work."""
    torch.set_num_threads(1)
    time.perf_counter, time.perf_counter_ns = time.thread_time, time.thread_time_ns


def _residual(
    name: str, target: dict[str, float], device: torch.device, alone: Any, tiny: bool
) -> Row:
    planned = Changed(ours(dry_run=True, **target))
    step = build(name, planned, device, tiny=tiny)
    for number in range(WARM_UP + 4):
        step(number)
    assert planned.saver is not None
    promise, plan = planned.saver.promise, planned.saver.plan
    if promise is None or plan is None:
        return {"error": "no promise was made"}
    if not plan.changes_something():
        return {"nothing": list(plan.notes)}
    del step
    clean(device)
    followed = Changed(lambda model: save_memory(model, plan=plan))
    with_plan = build(name, followed, device, tiny=tiny)
    for number in range(4):
        with_plan(number)
    wait(device)
    reset_peak(device)
    with_plan(0)
    peak_bytes = peak(device)
    plain = build(name, Changed(as_it_is), device, tiny=tiny)
    for number in range(3):
        plain(number)
    rounds = _TINY_ROUNDS if tiny else _ROUNDS
    with alone():
        pairs = [(timed(plain, device), timed(with_plan, device)) for _ in range(rounds)]
    measured = statistics.median(after / before for before, after in pairs)
    promised = promise.step_ns / promise.step_ns_before
    assert followed.saver is not None
    held = followed.saver.held_bytes if peak_bytes is None else peak_bytes
    expected = plan.saved_bytes if peak_bytes is None else promise.peak_bytes
    return {
        "ms": round(statistics.median(before for before, _ in pairs), 3),
        "step_promised": round(promised, 4),
        "step_measured": round(measured, 4),
        "step_residual": round(measured / promised, 4),
        "extra_residual": round((measured - 1) / max(1e-9, promised - 1), 3),
        "bytes_promised": expected,
        "bytes_measured": held,
        "bytes_residual": None if held is None else round(held / max(1, expected), 4),
        "notes": followed.saver.notes,
    }


def quantiles(values: list[float]) -> tuple[float, float]:
    """The range that all but the tails lie in."""
    ordered = sorted(values)
    low = int(_TAILS * (len(ordered) - 1))
    return ordered[low], ordered[len(ordered) - 1 - low]


def summary(rows: list[Row]) -> str:
    lines = []
    for device in sorted({row["device"] for row in rows}):
        for name in ("step_residual", "extra_residual", "bytes_residual"):
            found = [row[name] for row in rows if row["device"] == device and row.get(name)]
            if found:
                low, high = quantiles(found)
                lines.append(
                    f"{device}: {name} of {len(found)} rows: {low:.3f} to {high:.3f}, median "
                    f"{statistics.median(found):.3f}, furthest {min(found):.3f} and "
                    f"{max(found):.3f}"
                )
    failed = [row for row in rows if "error" in row]
    lines += [f"{row['model']}, {row['target']}: {row['error']}" for row in failed]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
