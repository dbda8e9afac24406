"""What capture costs: the same script with and without stepscope, interleaved, compared in pairs.

    python benchmarks/capture.py [--pairs 6] [--json FILE] -- SCRIPT [ARGUMENTS...]

SCRIPT prints a JSON line with `steps_s`, its own step times, and `loss`. Steps outside the window
are compared: median over the plain steps of one run, ratio within each pair of runs, and a 95%
bootstrap interval over pairs. Works with torch and the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent.parent / "src"
WAIT, WARMUP, ACTIVE = 20, 2, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="keep the last run folder here")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    pairs = [
        _pair(options.command, options.ranks, i, options.keep if i == options.pairs - 1 else None)
        for i in range(options.pairs)
    ]
    result = _summary(pairs)
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result))


def _pair(command: list[str], ranks: int, number: int, keep: Path | None) -> dict[str, Any]:
    order = ("bare", "captured") if number % 2 == 0 else ("captured", "bare")
    runs = {kind: _run(command, ranks, keep, capture=kind == "captured") for kind in order}
    bare, captured = runs["bare"], runs["captured"]
    return {
        "bare_ms": bare["outside_ms"],
        "captured_ms": captured["outside_ms"],
        "window_ms": captured["window_ms"],
        "ratio": captured["outside_ms"] / bare["outside_ms"],
        "window_ratio": captured["window_ms"] / bare["outside_ms"],
        "same_loss": bare["loss"] == captured["loss"],
        "peak": captured["peak"],
        "bare_peak": bare["peak"],
    }


def _run(command: list[str], ranks: int, keep: Path | None, *, capture: bool) -> dict[str, Any]:
    environment = dict(os.environ)
    how = [sys.executable]
    if ranks > 1:
        how += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with tempfile.TemporaryDirectory() as scratch:
        if capture:
            folder = keep if keep is not None else Path(scratch) / "run"
            folder.mkdir(parents=True, exist_ok=True)
            settings = {"folder": str(folder), "wait": WAIT, "warmup": WARMUP, "active": ACTIVE}
            environment["STEPSCOPE_CAPTURE"] = json.dumps(settings)
            inject = str(SOURCE / "stepscope/measure/inject")
            environment["PYTHONPATH"] = os.pathsep.join((inject, str(SOURCE)))
        done = subprocess.run(
            [*how, *command], env=environment, capture_output=True, text=True, check=True
        )
    line = next(text for text in done.stdout.splitlines() if text.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    steps = [s * 1000 for s in found["steps_s"]]
    # gap i lies between the ends of steps i and i + 1: it is the time of step i + 1
    first = WAIT - 1
    inside = steps[first + WARMUP : first + WARMUP + ACTIVE - 1]
    outside = steps[5 : first - 1] + steps[first + WARMUP + ACTIVE + 3 :]
    return {
        "outside_ms": statistics.median(outside),
        "window_ms": statistics.median(inside),
        "loss": found["loss"],
        "peak": found.get("peak"),
    }


def _summary(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [pair["ratio"] for pair in pairs]
    draw = random.Random(0)
    means = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "pairs": len(pairs),
        "bare_ms": statistics.median(pair["bare_ms"] for pair in pairs),
        "captured_ms": statistics.median(pair["captured_ms"] for pair in pairs),
        "ratio": statistics.median(ratios),
        "low": means[50],
        "high": means[-51],
        "window_ratio": statistics.median(pair["window_ratio"] for pair in pairs),
        "same_loss": all(pair["same_loss"] for pair in pairs),
        "peak": pairs[-1]["peak"],
        "bare_peak": pairs[-1]["bare_peak"],
    }


if __name__ == "__main__":
    main()
