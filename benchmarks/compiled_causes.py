"""Planted causes in compiled trainings: found at their lines, and what they are said to cost.

    python benchmarks/compiled_causes.py [--rounds 3] [--steps 150] [--causes breaks,length,number]

Each cause is trained with and without it, in turns. Three graph breaks cost every step: stepscope's
cost of the breaks is compared with the difference of the steps, both outside the profiler's window.
A batch whose length changes and a Python number that changes cost compilations: the seconds that
stepscope names are compared with the difference of the seconds that the whole trainings take.
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
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]
CAUSES = ("breaks", "length", "number")
_WARM = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--causes", default=",".join(CAUSES))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return _train(options.worker, options.steps)
    for cause in options.causes.split(","):
        _compare(cause, options)
    return 0


def _compare(cause: str, options: argparse.Namespace) -> None:
    runs: dict[str, list[dict[str, Any]]] = {"with": [], "without": []}
    promised, lines = [], set()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for kind in ("with", "without"):
                out = Path(folder, f"{kind}-{number}")
                which = cause if kind == "with" else f"no-{cause}"
                runs[kind].append(_run(which, out, options.steps))
                if kind == "with":
                    cost, its_lines = _explained(cause, out)
                    promised.append(cost)
                    lines |= its_lines
                print(f"{which}: {json.dumps(runs[kind][-1])} {promised[-1]:.3f}", flush=True)
    name = "quick_ms" if cause == "breaks" else "training_s"
    pairs = zip(runs["with"], runs["without"], strict=True)
    real = statistics.median(a[name] - b[name] for a, b in pairs)
    told = statistics.median(promised)
    planted = _planted(cause)
    unit = "ms a step" if cause == "breaks" else "s of the run"
    print(
        f"{cause}: lines {sorted(lines)} (planted {sorted(planted)}), stepscope {told:.3f} {unit}, "
        f"removing it saves {real:.3f}: {told / real - 1:+.0%}",
        flush=True,
    )


def _planted(cause: str) -> set[int]:
    lines = Path(__file__).read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith(f"# planted: {cause}")}


def _run(which: str, out: Path, steps: int) -> dict[str, Any]:
    own = [sys.executable, __file__, "--worker", which, "--steps", str(steps)]
    ours = [sys.executable, "-m", "stepscope", "run", "--no-explain", "--out", str(out)]
    window = ["--wait", str(steps - 12), "--warmup", "3", "--active", "6", "--repeat", "1"]
    paths = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCHINDUCTOR_CACHE_DIR": f"{out}-cache",
    }
    command = [*ours, *window, "--", *own]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-800:])
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def _explained(cause: str, out: Path) -> tuple[float, set[int]]:
    """Milliseconds a step or seconds of the run, and the lines in this file."""
    from stepscope.explain.explain_job import explain_job

    work = explain_job(out, cache=False).ranks[0].compiled
    if work is None:
        raise SystemExit(f"{out}: nothing compiled")
    if cause == "breaks":
        places = [one.place for one in work.breaks if one.cost_ms]
        cost = sum(one.cost_ms or 0.0 for one in work.breaks)
    else:
        places = [guard.place or one.place for one in work.recompiled for guard in one.guards]
        cost = sum(one.seconds for one in work.recompiled)
    here = Path(__file__).name
    return cost, {place.line for place in places if place and Path(place.file).name == here}


def _train(which: str, steps: int) -> int:
    import torch
    from torch import nn
    from torch.nn.functional import gelu, mse_loss

    torch.manual_seed(0)

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
            self.scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = gelu(self.layers[0](x))
            if which == "breaks":
                x.mean().item()  # planted: breaks
            x = gelu(self.layers[1](x))
            if which == "breaks":
                torch._dynamo.graph_break()  # planted: breaks
            x = gelu(self.layers[2](x))
            if which == "breaks" and x.sum() > 1e9:  # planted: breaks
                x = x / 2
            if which.endswith("number"):
                x = x * self.scale  # planted: number
            return self.layers[3](x)

    model = Broken()
    compiled = torch.compile(model, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps_ms = []
    whole = time.perf_counter()
    for number in range(steps):
        began = time.perf_counter()
        rows = 64 + 8 * (number // 20 % 4) if which == "length" else 64
        if which == "number":
            model.scale = 1.0 + number // 20 % 4
        x = torch.ones(rows, 256)
        loss = mse_loss(compiled(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps_ms.append(1e3 * (time.perf_counter() - began))
    quick = sorted(steps_ms[_WARM : steps - 14])
    facts = {
        "quick_ms": quick[len(quick) // 4],
        "training_s": time.perf_counter() - whole,
        "compiling_s": sum(one for one in steps_ms if one > 20 * quick[0]) / 1e3,
    }
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
