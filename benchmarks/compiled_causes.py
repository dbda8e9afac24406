"""Planted causes in compiled trainings: found at their lines, and what they are said to cost.

    python benchmarks/compiled_causes.py [--rounds 3] [--blocks 12] [--causes breaks,length,number]

Every round is one training under `stepscope run`, which measures itself what the cause costs. So a
machine that is busy slows both sides of the comparison alike.

Three graph breaks cost every step. The model with and without them trains in turns, a block of
steps each; the cost is the median difference of neighbouring blocks, of each block's median step,
by the processor's own time on one thread: that of others does not count. The profiler's window then
sees the broken model only: stepscope's cost of the breaks is compared.
A batch whose length changes and a Python number that changes cost compilations: the steps that
compiled again, beyond the usual step, are compared with the seconds that stepscope names.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]
CAUSES = ("breaks", "length", "number")
BLOCK = 10  # steps
_ACTIVE = 12  # steps in the profiler's window
_AGAIN = 8.0  # times the usual step: such a step compiles


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=12, help="of ten steps with, ten without")
    parser.add_argument("--causes", default=",".join(CAUSES))
    parser.add_argument("--save", type=Path, help="JSON, written after every round")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return _train(options.worker, options.blocks)
    rows: list[dict[str, Any]] = []
    for cause in options.causes.split(","):
        for _ in range(options.rounds):
            rows.append(_measure(cause, options.blocks))
            print(json.dumps(rows[-1]), flush=True)
            if options.save:
                options.save.write_text(json.dumps(rows, indent=1))
    print(summary(rows))
    return 0


def _measure(cause: str, blocks: int) -> dict[str, Any]:
    """One round; its trouble is not the next one's."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            real = _run(cause, Path(folder, "run"), blocks)
            said, lines = _explained(cause, Path(folder, "run"))
        except (RuntimeError, ValueError) as error:
            return {"cause": cause, "error": str(error)[-600:]}
    return {"cause": cause, "said": said, "lines": sorted(lines), **real}


def summary(rows: list[dict[str, Any]]) -> str:
    """A line for each cause: the median round."""
    lines = []
    for cause in dict.fromkeys(row["cause"] for row in rows):
        same = [row for row in rows if row["cause"] == cause and "error" not in row]
        if not same:
            lines.append(f"{cause}: every round failed")
            continue
        said, real = (statistics.median(row[name] for row in same) for name in ("said", "real"))
        errors = sorted(row["said"] / row["real"] - 1 for row in same if row["real"] > 0)
        spread = f" ({errors[0]:+.0%} to {errors[-1]:+.0%})" if errors else ""
        found = sorted({line for row in same for line in row["lines"]})
        unit = "ms a step" if cause == "breaks" else "s of the run"
        change = f"{said / real - 1:+.0%}" if real > 0 else "not resolved"
        lines.append(
            f"{cause}: lines {found} (planted {sorted(_planted(cause))}), stepscope {said:.3f} "
            f"{unit}, without it {real:.3f} less: {change}{spread}"
        )
    return "\n".join(lines)


def _planted(cause: str) -> set[int]:
    lines = Path(__file__).read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith(f"# planted: {cause}")}


def _run(cause: str, out: Path, blocks: int) -> dict[str, Any]:
    own = [sys.executable, __file__, "--worker", cause, "--blocks", str(blocks)]
    ours = [sys.executable, "-m", "stepscope", "run", "--no-explain", "--out", str(out)]
    wait = _timed_steps(cause, blocks) + 2
    window = ["--wait", str(wait), "--warmup", "3", "--active", str(_ACTIVE), "--repeat", "1"]
    paths = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCHINDUCTOR_CACHE_DIR": f"{out}-cache",
        "OMP_NUM_THREADS": "1",  # threads that lose their core hold up the others
    }
    command = [*ours, *window, "--", *own]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-600:])
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def _timed_steps(cause: str, blocks: int) -> int:
    """Before the profiler's window."""
    return 2 * BLOCK * blocks + 2 * BLOCK if cause == "breaks" else BLOCK * blocks


def _explained(cause: str, out: Path) -> tuple[float, set[int]]:
    """Milliseconds a step or seconds of the run, and the lines in this file."""
    from stepscope.explain.explain_job import explain_job

    work = explain_job(out, cache=False).ranks[0].compiled
    if work is None:
        raise RuntimeError(f"{out}: nothing compiled")
    if cause == "breaks":
        places = [one.place for one in work.breaks if one.cost_ms]
        cost = sum(one.cost_ms or 0.0 for one in work.breaks)
    else:
        places = [guard.place or one.place for one in work.recompiled for guard in one.guards]
        cost = sum(one.seconds for one in work.recompiled)
    here = Path(__file__).name
    return cost, {place.line for place in places if place and Path(place.file).name == here}


def _train(cause: str, blocks: int) -> int:
    import torch
    from torch import nn
    from torch.nn.functional import gelu, mse_loss

    torch.manual_seed(0)

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
            self.scale = 1.0

    class Broken(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = gelu(self.layers[0](x))
            x.mean().item()  # planted: breaks
            x = gelu(self.layers[1](x))
            torch._dynamo.graph_break()  # planted: breaks
            x = gelu(self.layers[2](x))
            if x.sum() > 1e9:  # planted: breaks
                x = x / 2
            return self.layers[3](x)

    class Whole(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = gelu(self.layers[0](x))
            x = gelu(self.layers[1](x))
            x = gelu(self.layers[2](x))
            return self.layers[3](x) * self.scale  # planted: number

    clock = time.process_time if cause == "breaks" else time.perf_counter

    def trainer(model: Layers) -> Callable[[int], float]:
        compiled = torch.compile(model, dynamic=False)

        def step(rows: int) -> float:
            began = clock()
            x = torch.ones(rows, 256)
            loss = mse_loss(compiled(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return 1e3 * (clock() - began)

        return step

    models = [Broken(), Whole()]
    both = [weight for model in models for weight in model.parameters()]
    optimizer = torch.optim.SGD(both, lr=1e-3)  # one: its steps are the training's
    broken, whole = (trainer(model) for model in models)
    if cause == "breaks":
        real = _break_ms(broken, whole, blocks)
        last = broken
    else:
        real = _compiled_again_s(cause, whole, models[1], blocks)
        last = whole
    for _ in range(_ACTIVE + 8):
        last(64)
    print(json.dumps({"real": real}))
    return 0


def _break_ms(broken: Callable[[int], float], whole: Callable[[int], float], blocks: int) -> float:
    """The median of the differences between neighbouring blocks."""
    for step in (broken, whole):
        for _ in range(BLOCK):
            step(64)
    differences = []
    for number in range(blocks):
        ms = {}
        for step in (broken, whole) if number % 2 else (whole, broken):
            ms[step] = statistics.median(step(64) for _ in range(BLOCK))
        differences.append(ms[broken] - ms[whole])
    return statistics.median(differences)


def _compiled_again_s(cause: str, step: Callable[[int], float], model: Any, blocks: int) -> float:
    """Of the first step, and of those that compile again, only the latter are the cause's."""
    steps_ms = []
    for number in range(BLOCK * blocks):
        rows = 64 + 8 * (number // 20 % 4) if cause == "length" else 64
        if cause == "number":
            model.scale = 1.0 + number // 20 % 4
        steps_ms.append(step(rows))
    usual = statistics.median(steps_ms)
    again = [ms - usual for ms in steps_ms[1:] if ms > _AGAIN * usual]
    return sum(again) / 1e3


if __name__ == "__main__":
    sys.exit(main())
