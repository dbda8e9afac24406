"""Promised against delivered: steps under DDP predicted from a trace of one rank alone.

    python benchmarks/ddp_prediction.py                        2 ranks, three bucket sizes
    python benchmarks/ddp_prediction.py --ranks 4 --sleep 0.005
    python benchmarks/ddp_prediction.py --strong               the batch shared by the ranks

A 1-rank trace, its steps without the profiler and a calibration give the prediction; the same
processes then run under DDP (see workloads/replicas.py). Other options go to the workload: --model,
--width, --layers, --batch, --buckets, --rounds, --steps, --priority.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.predict.engine import Bench
from stepscope.records.prediction import Prediction, Setting
from stepscope.records.rank import MeasuredSteps, RankInputs
from stepscope.trace.read import read_trace
from stepscope.ui.topics.measurements import fit_profile

WORKLOAD = Path(__file__).with_name("workloads") / "replicas.py"
AGREES = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One bucket size."""

    bucket_mb: float
    promised: Prediction
    bare: Prediction  # from the trace alone, corrected for the profiler by the model
    delivered_ms: float
    rounds_ms: tuple[float, ...]

    @property
    def error(self) -> float:
        return self.promised.predicted_ms / self.delivered_ms - 1

    @property
    def noise(self) -> float:
        """How much rounds differ: half the range ÷ the median."""
        return (max(self.rounds_ms) - min(self.rounds_ms)) / 2 / self.delivered_ms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strong", action="store_true", help="one batch among all ranks")
    parser.add_argument("--keep", type=Path, help="keep trace and measurements in this folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a promise fails")
    options, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = options.keep or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        measured = measure(options.ranks, out, [*rest, *["--strong"] * options.strong])
        rows = compare(options.ranks, out, measured, strong=options.strong)
    show(options.ranks, measured, rows)
    if options.json:
        options.json.write_text(json.dumps([as_plain(row) for row in rows], indent=1))
    keeps_targets = all(abs(row.error) <= AGREES for row in rows) and right_order(rows)
    return 1 if options.check and not keeps_targets else 0


def measure(ranks: int, out: Path, rest: list[str]) -> dict[str, Any]:
    """Start the ranks, wait for them, read what they measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(WORKLOAD), "--out", str(out), "--ranks", str(ranks), *rest],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        timeout=900,
        start_new_session=True,
    )
    if done.returncode:
        raise SystemExit(f"a rank ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads((out / "measured.json").read_text())
    return found


def compare(ranks: int, out: Path, measured: dict[str, Any], *, strong: bool = False) -> list[Row]:
    trace = read_trace(out / "trace.json", cache=False)
    profile = fit_profile(raw_calibration(ranks, measured))
    steps = [round(ns * 1e9) for block in measured["alone"] for ns in block]
    middle = round(statistics.median(steps))
    truth = MeasuredSteps(
        steps=len(steps),
        steps_ns=tuple(steps),
        step_ns=middle,
        wall_ns=middle,
        device_ns=None,
        phases_ns={},
    )
    known, bare = (
        Bench(RankAnalysis(RankInputs(trace=trace, measured=steps, calibrations=(profile,))))
        for steps in (truth, None)
    )
    rows = []
    for name, blocks in measured["together"].items():
        wanted = [
            Setting(name="workers", value=f"{ranks}:strong" if strong else str(ranks)),
            Setting(name="bucket-mb", value=name),
        ]
        rows.append(
            Row(
                bucket_mb=float(name),
                promised=known.predict(wanted),
                bare=bare.predict(wanted),
                delivered_ms=1e3 * statistics.median(s for block in blocks for s in block),
                rounds_ms=tuple(1e3 * statistics.median(block) for block in blocks),
            )
        )
    return rows


def raw_calibration(ranks: int, measured: dict[str, Any]) -> dict[str, Any]:
    """As `stepscope calibrate` would write it: the rounds' sweeps become passes of one sweep."""
    sweeps = measured["sweeps"]
    sizes = min((sweep["sizes_bytes"] for sweep in sweeps), key=len)
    passes = [one[: len(sizes)] for sweep in sweeps for one in sweep["passes_ns"]]
    return {
        "host": socket.gethostname(),
        "device": "cpu",
        "kind": "cpu",
        "torch": "",
        "when_unix": time.time(),
        "world_size": ranks,
        "backend": "gloo",
        "machine": {"threads": 1, "matmul_flops": {}, "not_offered": {}},
        "sweeps": [
            {
                "kind": "all_reduce",
                "group": "world",
                "group_size": ranks,
                "sizes_bytes": sizes,
                "passes_ns": passes,
            }
        ],
        "not_offered": [],
        "contention": middle_of(measured["contention"]) or untouched(sizes, passes),
    }


def untouched(sizes: list[int], passes: list[list[list[float]]]) -> list[dict[str, float]]:
    """Compute that sleeps neither slows communication nor is slowed by it."""
    times = [statistics.median(ns for one in passes for ns in one[i]) for i in range(len(sizes))]
    return [
        {"size_bytes": size, "alone_ns": ns, "lasts_ns": ns, "compute_ns": 1.0, "slowed_ns": 1.0}
        for size, ns in zip(sizes, times, strict=True)
    ]


def middle_of(rounds: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    return [
        {name: statistics.median(each[name] for each in same) for name in same[0]}
        for same in zip(*rounds, strict=True)
    ]


def right_order(rows: list[Row]) -> bool:
    """Whether promises order the bucket sizes correctly where two differ by more than the noise."""
    for one in rows:
        for other in rows:
            apart = 1 - one.delivered_ms / other.delivered_ms
            sure = apart > 2 * max(one.noise, other.noise, 0.02)
            if sure and one.promised.predicted_ms >= other.promised.predicted_ms:
                return False
    return True


def show(ranks: int, measured: dict[str, Any], rows: list[Row]) -> None:
    alone = 1e3 * statistics.median(s for block in measured["alone"] for s in block)
    loads = measured["load"]
    print(f"{ranks} ranks; alone {alone:.2f} ms a step; load {min(loads):.1f} to {max(loads):.1f}")
    print("bucket MiB   promised (95%)            delivered  error  noise   from the bare trace")
    for row in rows:
        told, bare = row.promised, row.bare
        print(
            f"{row.bucket_mb:10g}   {told.predicted_ms:7.2f} ({told.low_ms:.2f} to "
            f"{told.high_ms:.2f})   {row.delivered_ms:7.2f}  {row.error:+6.1%} {row.noise:6.1%}   "
            f"{bare.predicted_ms:7.2f} {bare.predicted_ms / row.delivered_ms - 1:+6.1%}"
        )
    print(f"order: {'right' if right_order(rows) else 'wrong'}")
    for line in rows[-1].promised.assumptions:
        print(f"  - {line}")


def as_plain(row: Row) -> dict[str, Any]:
    return {
        "bucket_mb": row.bucket_mb,
        "promised_ms": row.promised.predicted_ms,
        "low_ms": row.promised.low_ms,
        "high_ms": row.promised.high_ms,
        "bare_ms": row.bare.predicted_ms,
        "delivered_ms": row.delivered_ms,
        "rounds_ms": row.rounds_ms,
        "error": row.error,
    }


if __name__ == "__main__":
    sys.exit(main())
