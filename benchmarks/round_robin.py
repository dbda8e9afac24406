"""Gradients over two network links in turn, against the plain path over one.

    python benchmarks/round_robin.py                    two hosts, two links of 200 Mbit/s each
    python benchmarks/round_robin.py --rate 400mbit --layers 24

Hosts are namespaces of this machine with shaped links (tests/hosts/lab.py; needs root); nothing of
them stays, even if this process is killed. Layers pause instead of computing, because the ranks
share this machine's cores. Three ways train in turns, from the same weights on the same data:
plain DDP over the first link, round-robin over both, and round-robin over two groups on the first
link. `--check` exits with 1 unless two links give 1.6x, one link gives no such thing, and all
losses have the same bits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from shaped_hosts import first_ranks_answer, why_not

WORKLOAD = Path(__file__).with_name("workloads") / "two_links.py"

TARGET = 1.6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate", default="200mbit", help="of each link, as tc writes it")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    options, rest = parser.parse_known_args()
    if reason := why_not():
        print(f"no hosts here: {reason}", file=sys.stderr)
        return 4
    measured = first_ranks_answer(WORKLOAD, rest, options.rate, links=2)
    medians = {name: statistics.median(one["steps_s"]) for name, one in measured.items()}
    plain = medians["plain"]
    print(f"links of {options.rate}\n\n| way | step | against plain | bytes sent by link |")
    print("|---|---|---|---|")
    for name, median in medians.items():
        sent = ", ".join(f"{n / 1e6:.0f} MB" for n in measured[name]["sent_bytes"].values())
        print(f"| {name} | {1e3 * median:.0f} ms | {plain / median:.2f}x | {sent} |")
    same = len({tuple(one["losses"]) for one in measured.values()}) == 1
    print(f"\n{len(measured['plain']['losses'])} losses, {'same' if same else 'DIFFERENT'} bits")
    pays = plain / medians["several links"] >= TARGET
    pays_on_one = plain / medians["one link"] >= TARGET
    return 1 if options.check and not (same and pays and not pays_on_one) else 0


if __name__ == "__main__":
    sys.exit(main())
