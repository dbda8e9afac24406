"""stepscope against traceinsight, the next HTA: every trace in a folder, and one of 1 GB.

    python benchmarks/peers.py --ours PYTHON --peer PYTHON [--traces DIR] [--check]

Each interpreter has one of the tools installed. README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import table
from measurement import HERE, Bench, Measurement, speed, summary
from process import environment, run
from targets import BIG_PEAK, Result, Target

if TYPE_CHECKING:
    from collections.abc import Sequence

TRACES = HERE.parent.parent / "shared" / "traces"
BIG_SOURCE = "h200/gpt2s_b8_bf16_stack.json.gz"


def main() -> None:
    chosen = _arguments()
    traces = sorted(chosen.traces.rglob("*.json.gz"))
    if not traces:
        raise SystemExit(f"no *.json.gz in {chosen.traces}")
    bench = Bench(ours=chosen.ours, peer=chosen.peer, timeout_s=chosen.timeout)
    bench.measure(traces[0], repeats=1)  # compiles modules that were never imported
    print(f"{_machine()}; medians of {chosen.repeats} fresh processes, ours and HTA's in turn\n")
    rows: list[Measurement] = []
    print(table.HEAD)
    for trace in traces:
        if chosen.only in str(trace):
            rows.append(bench.measure(trace, chosen.repeats))
            print(table.line(rows[-1]), flush=True)
    results = summary(rows)
    print(f"\n{speed(rows)}")
    _print_failures(rows)
    both = sum(row.peer_failure is None for row in rows)
    _print_results(f"Geometric means over the {both} traces that both can read", results)
    big = None if chosen.no_big else _measure_big(chosen, bench)
    if big:
        results = (*results, big[1])
    if chosen.json:
        chosen.json.write_text(_as_json(rows, results, big[0] if big else None))
    if chosen.check and not all(result.met for result in results):
        sys.exit(1)


def _measure_big(chosen: argparse.Namespace, bench: Bench) -> tuple[Measurement, Result]:
    source = chosen.big_source or chosen.traces / BIG_SOURCE
    with tempfile.TemporaryDirectory(dir=chosen.work) as folder:
        trace = Path(folder) / "big.json"
        command = (
            sys.executable, str(HERE / "big_trace.py"), str(source), str(trace),
            "--bytes", str(chosen.big_bytes),
        )  # fmt: skip
        made = run(command, environment(), keep_output=False, timeout_s=chosen.timeout)
        if made.failure:
            raise SystemExit(f"big_trace.py failed: {made.failure}")
        peer = chosen.peer if chosen.peer_big else None
        alone = Bench(ours=bench.ours, peer=peer, timeout_s=bench.timeout_s)
        row = alone.measure(trace, repeats=1)
        size = trace.stat().st_size
    print(f"\n{size / 1e9:.2f} GB of text, {row.events} events: {source.name} repeated (one run)")
    print("\n".join((table.HEAD, table.line(row), speed([row]))))
    _print_failures([row])
    target = Target(
        name=BIG_PEAK.name.replace("1 GB", f"{size / 1e9:.1f} GB"),
        at_most=BIG_PEAK.at_most,
        unit=BIG_PEAK.unit,
    )
    result = Result(target=target, value=row.peak_bytes / 1e9)
    print(result.row())
    return row, result


def _print_failures(rows: Sequence[Measurement]) -> None:
    failed = [row for row in rows if row.peer_failure]
    if failed:
        print(f"\nHTA fails on {len(failed)}:")
    for row in failed:
        print(f"  {row.name:<36} {row.peer_failure or '':.60}")


def _print_results(title: str, results: Sequence[Result]) -> None:
    print("\n" + "\n".join((title, *(result.row() for result in results))))


def _as_json(
    rows: Sequence[Measurement], results: Sequence[Result], big: Measurement | None
) -> str:
    whole: dict[str, Any] = {
        "schema": 1,
        "machine": _machine(),
        "traces": [asdict(row) for row in rows],
        "big": asdict(big) if big else None,
        "results": [
            {"name": r.target.name, "value": r.value, "limit": r.target.limit, "met": r.met}
            for r in results
        ],
    }
    return json.dumps(whole, indent=1) + "\n"


def _machine() -> str:
    day = datetime.now(UTC).date().isoformat()
    return f"{day}, {os.cpu_count()}-core {platform.machine()}, Python {platform.python_version()}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ours", default=sys.executable, help="a Python with stepscope")
    parser.add_argument("--peer", help="a Python with traceinsight; without: ours alone")
    parser.add_argument("--traces", type=Path, default=TRACES, help="a folder of *.json.gz")
    parser.add_argument("--only", default="", help="only traces whose path has this in it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-big", action="store_true", help="leave the 1 GB trace out")
    parser.add_argument("--big-source", type=Path, help=f"what to repeat (default {BIG_SOURCE})")
    parser.add_argument("--big-bytes", type=int, default=1_000_000_000)
    parser.add_argument("--peer-big", action="store_true", help="HTA on the 1 GB trace too")
    parser.add_argument("--work", type=Path, help="where the 1 GB trace goes (default: temporary)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one process")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
