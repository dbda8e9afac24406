"""The bucket tuner's choice against the best of a full sweep, on a shaped link.

    python benchmarks/bucket_tuner.py                           two hosts, a link of 400 Mbit/s
    python benchmarks/bucket_tuner.py --rate 200mbit --pause-ms 4

Hosts are namespaces of this machine with shaped links (tests/hosts/lab.py; needs root); nothing of
them stays, even if this process is killed. Layers pause instead of computing, because the ranks
share this machine's cores. After tuning, all sizes take turns in the same process. `--check` exits
with 1 unless the choice is within 3% of the best and took fewer than 60 steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shaped_hosts import first_ranks_answer, why_not

WORKLOAD = Path(__file__).with_name("workloads") / "bucket_sweep.py"

TARGET = 1.03
MOST_STEPS = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate", default="400mbit", help="of the link, as tc writes it")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    options, rest = parser.parse_known_args()
    if reason := why_not():
        print(f"no hosts here: {reason}", file=sys.stderr)
        return 4
    found = first_ranks_answer(WORKLOAD, rest, options.rate)
    print("\n".join(found["report"]))
    best = min(ms for _, ms, is_swept, _, _ in found["rows"] if is_swept)
    (chosen,) = [ms for _, ms, _, _, is_chosen in found["rows"] if is_chosen]
    print(f"\na link of {options.rate}; {found['steps']} steps to tune\n")
    print("| bucket size | step | against the best of the sweep | |\n|---|---|---|---|")
    for sizes, ms, is_swept, is_before, is_chosen in sorted(found["rows"], key=lambda row: row[1]):
        words = {"tuner": is_chosen, "script": is_before, "sweep": is_swept}
        named = ", ".join(word for word, holds in words.items() if holds)
        print(f"| {sizes} | {ms:.0f} ms | {ms / best:.3f} | {named} |")
    print(f"\nthe tuner's choice takes {chosen / best:.3f} of the best of the sweep")
    keeps_targets = chosen <= TARGET * best and found["steps"] < MOST_STEPS
    return 1 if options.check and not keeps_targets else 0


if __name__ == "__main__":
    sys.exit(main())
