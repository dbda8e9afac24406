"""`make fuzz`: so many damaged inputs of every kind, and what became of them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fuzz.mutate import KINDS
from fuzz.runner import run_many

if TYPE_CHECKING:
    from fuzz.runner import Tally


def main() -> None:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000, help="over all kinds together")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only these kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"))
    options = parser.parse_args()
    kinds = options.kind or KINDS
    failures = 0
    began = time.monotonic()
    share = -(-options.cases // len(kinds))
    for kind in kinds:
        cases = range(options.first, options.first + share)
        since = time.monotonic()
        tally = run_many(
            kind, cases, seed=options.seed, workers=options.workers, keep=options.failures
        )
        failures += sum(tally.causes.values())
        _report(kind, len(cases), tally, time.monotonic() - since)
    minutes = (time.monotonic() - began) / 60
    print(f"{share * len(kinds):,} cases, seed {options.seed}, {minutes:.1f} min: ", end="")
    print(f"{failures} failures, kept in {options.failures}" if failures else "no failure")
    sys.exit(bool(failures))


def _report(kind: str, cases: int, tally: Tally, seconds: float) -> None:
    ended = ", ".join(f"{count:,} {name}" for name, count in sorted(tally.ended.items()))
    slowest = f"slowest {tally.slowest_s:.1f} s"
    print(f"{kind}: {cases:,} cases in {seconds:.0f} s ({slowest}): {ended}", flush=True)
    for cause, count in tally.causes.most_common():
        print(f"  {count:>6}  {cause}  (case {tally.first[cause].case})", flush=True)


if __name__ == "__main__":
    main()
