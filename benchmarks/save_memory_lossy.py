"""Whether rounding what is kept for backward costs quality: steps to each training's target.

    python benchmarks/save_memory_lossy.py --save lossy.json [--seconds 300] [--models gpt2]
    python benchmarks/save_memory_lossy.py --save lossy.json --print

Every training of the suite runs to its target (`stepscope bench` has the same) from several seeds:
plainly, plainly once more (the same against the same) and with each lossy encoding. An encoding is
within the control's spread where its mean over the seeds is at most the slowest plain seed, and
every seed that reached the target plainly reaches it. Steps count, not seconds: what a step costs
is save_memory_table.py's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.append(str(Path(__file__).parent.parent / "src"))

from save_memory_models import Changed, ChangedPlace, as_it_is
from save_memory_rows import measure_rows, saved_rows
from stepscope.bench import catalogue
from stepscope.bench.rules import steps_to_target
from stepscope.fix import save_memory
from stepscope.fix.saved.step_record import LOSSY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from save_memory_rows import Row

PLAIN, AGAIN = "plain", "plain again"
MODELS = (
    *("pointnet-cls", "resnet50", "gpt2", "transformer", "vgg16", "bert-medium"),
    *("diffusion-unet", "nmt-lstm", "mobilenet-v3-large", "inception-v3"),
)


def main() -> None:
    options = _options()
    rows = saved_rows(options.save)
    if not options.print:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        rows = measure_rows(
            _cells(options),
            lambda cell: _trained(cell, device),
            path=options.save,
            seconds=options.seconds,
        )
    print(verdicts(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="start no row after this")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--size", default="tiny", help="tiny, small or paper")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="JSON; read first, written after every row")
    parser.add_argument("--print", action="store_true", help="measure nothing")
    return parser.parse_args()


def _cells(options: argparse.Namespace) -> Iterator[Row]:
    for model in options.models.split(","):
        for seed in range(options.seeds):
            for way in (PLAIN, *LOSSY, *((AGAIN,) if seed == 0 else ())):
                yield {"model": model, "size": options.size, "way": way, "seed": seed}


def _trained(cell: Row, device: torch.device) -> Row:
    """Until the target is reached, at most as long as it allows."""
    torch.manual_seed(cell["seed"])
    workload = catalogue.load(cell["model"])
    target = workload.targets[cell["size"]]
    lossy = cell["way"] if cell["way"] in LOSSY else None
    savers: list[Any] = []

    def change(model: torch.nn.Module) -> None:
        if lossy is not None:
            savers.append(save_memory(model, lossy=lossy, warmup=0))

    changed = Changed(as_it_is if lossy is None else change)
    place = ChangedPlace(device, seed=cell["seed"], changed=changed)
    step = workload.build(workload.config(cell["size"]), place)
    losses: list[float | None] = []
    while len(losses) < target.steps and steps_to_target(losses, target) is None:
        loss = float(step(len(losses)).detach())
        losses.append(loss if loss == loss and abs(loss) != float("inf") else None)
    return {
        "steps": steps_to_target(losses, target),
        "allowed": target.steps,
        "target": target.loss,
        "loss": losses[-1],
        "rounded_share": _rounded_share(savers) if savers else None,
    }


def _rounded_share(savers: list[Any]) -> float:
    """Of what backward kept: how much is held in the lossy encoding."""
    rows = [row for saver in savers if saver.plan is not None for row in saver.plan.rows]
    kept = [row for row in rows if row.was_kept]
    rounded = [row for row in kept if "lossy" in row.action]
    total = sum(row.size_bytes for row in kept)
    return round(sum(row.size_bytes for row in rounded) / max(1, total), 3)


def verdicts(rows: list[Row]) -> str:
    """A table, and for each encoding in how many trainings it was within the control's spread."""
    by_model: dict[Any, dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if "error" not in row:
            by_model[row["model"]][row["way"]][row["seed"]] = row
    lines = [f"| training | plain | {' | '.join(LOSSY)} |", f"|---|--:|{'--:|' * len(LOSSY)}"]
    within = {way: [0, 0] for way in LOSSY}
    for model, ways in by_model.items():
        plain = ways[PLAIN]
        cells = [_steps(plain)]
        if ways[AGAIN] and ways[AGAIN][0]["steps"] != plain[0]["steps"]:
            cells[0] += " (not repeatable)"
        for way in LOSSY:
            good = is_within(plain, ways[way])
            cells.append(_steps(ways[way]) + ("" if good is not False else " beyond"))
            if good is not None:
                within[way][0] += good
                within[way][1] += 1
        lines.append(f"| {model} | {' | '.join(cells)} |")
    lines.append("")
    for way, (good, all_of) in within.items():
        if all_of:
            lines.append(f"{way}: within the control's spread in {good} of {all_of} trainings")
    return "\n".join(lines)


def is_within(plain: dict[int, Row], lossy: dict[int, Row]) -> bool | None:
    """None where too little was measured, or plain training misses its target."""
    seeds = [seed for seed, row in plain.items() if row["steps"] is not None]
    if len(seeds) < 2 or not all(seed in lossy for seed in seeds):
        return None
    steps = [lossy[seed]["steps"] for seed in seeds]
    if None in steps:
        return False
    return statistics.mean(steps) <= max(plain[seed]["steps"] for seed in seeds)


def _steps(rows: dict[int, Row]) -> str:
    return ", ".join(str(row["steps"] or "missed") for _, row in sorted(rows.items())) or "-"


if __name__ == "__main__":
    main()
