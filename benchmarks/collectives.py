"""Algorithms of collectives over a slow network: formula against measured, and crossovers.

    python -m benchmarks.collectives [--hosts 4] [--ranks-per-host 1] [--rate 50mbit] [--delay-ms 5]
        [--kind all_reduce] [--sizes 4096,65536,1048576] [--seconds 120] [--json FILE] [--check]

Hosts are made of namespaces (tests/hosts/lab.py; needs root). A host's network device sends at a
limited rate (tbf), and what comes to it is late (netem, or late_link.c where the kernel has none).
No process and no device stays on the machine, even if this one is killed. alpha, beta and gamma
come from probes of that network, never from the algorithms' own times.

`--check` ends with 1 unless every formula is within 25% of what was measured (median over sizes)
and every crossover within a factor of two.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

TESTS = Path(__file__).parent.parent / "tests/hosts"
sys.path.insert(0, str(TESTS))

from lab import Lab, why_not  # noqa: E402
from late_lab import LateLab, why_no_late_links  # noqa: E402

from stepscope.predict.collective_laboratory import analyse  # noqa: E402
from stepscope.records.collective_schedules import COLLECTIVES  # noqa: E402
from stepscope.text.figures import (  # noqa: E402
    binary_size,
    duration,
    factor,
    percent,
    signed_percent,
)
from stepscope.ui.topics.measurements import link_rows  # noqa: E402

if TYPE_CHECKING:
    from stepscope.records.hardware import AlgorithmCrossover, LaboratoryReport

LARGEST_ERROR = 0.25
LARGEST_FACTOR = 2.0
SIZES = "4096,16384,65536,262144,1048576,4194304"
_BURST = "5kb"  # a larger one is sent at once, and small messages would meet no rate at all


def main() -> int:
    options = _options()
    if reason := why_not():
        sys.exit(f"no laboratory on this machine: {reason}")
    if options.delay_ms and (reason := why_no_late_links()):
        print(f"without a delay: {reason}")
        options.delay_ms = 0.0
    report = measure(options)
    show(report, options)
    if options.json:
        import msgspec

        options.json.write_bytes(msgspec.json.encode(report))
    return int(options.check and not meets_targets(report))


def measure(options: argparse.Namespace) -> LaboratoryReport:
    """One rank on each host of a shaped network."""
    delay_ms = options.delay_ms
    network = LateLab(options.hosts, delay_ms) if delay_ms else Lab(options.hosts)
    with network as lab, tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        for name in lab.hosts:
            lab.shape(name, options.rate, "out", burst=_BURST)
            lab.keep_windows(name)
        answer = Path(folder) / "raw.json"
        words = ["--algorithms", "--seconds", str(options.seconds), "--json", str(answer)]
        words += [word for kind in options.kind or COLLECTIVES for word in ("--kind", kind)]
        words += [word for size in options.sizes.split(",") for word in ("--size", size)]
        job = lab.torchrun(
            ["-m", "stepscope.measure.calibrate", *words], ranks=options.ranks_per_host
        )
        outcomes = {name: process.wait(options.timeout) for name, process in job.items()}
        for name, outcome in outcomes.items():
            if outcome.code:
                sys.exit(f"{name} ended with {outcome.code}:\n{outcome.stderr[-2000:]}")
        return analyse(json.loads(answer.read_text()))


def show(report: LaboratoryReport, options: argparse.Namespace) -> None:
    print(
        f"{options.hosts} hosts x {options.ranks_per_host}, {options.rate}, {options.delay_ms} ms "
        f"late; passes differ by {percent(report.link.noise)}"
    )
    print("; ".join(f"{label}: {value}" for label, value in link_rows(report)))
    for times in report.algorithms:
        cells = [
            f"{binary_size(one.size_bytes)} {duration(one.time_ns)}"
            + (
                f" ({signed_percent(one.predicted_ns / one.time_ns - 1)})"
                if one.predicted_ns is not None
                else ""
            )
            for one in times.sizes
        ]
        off = "-" if times.error is None else percent(times.error)
        print(f"{times.kind:15}{times.algorithm:20}{off:>6}   {'  '.join(cells)}")
    for crossover in report.crossovers:
        measured = crossover.measured_bytes
        seen = f"measured {binary_size(measured)}" if measured else "not seen"
        off = f", x{factor(_factor_off(crossover))}" if measured else ""
        print(
            f"{crossover.kind}: {crossover.below} until {binary_size(crossover.predicted_bytes)}, "
            f"then {crossover.above}; {seen}{off}"
        )


def meets_targets(report: LaboratoryReport) -> bool:
    errors = [times.error for times in report.algorithms if times.error is not None]
    factors = [_factor_off(crossover) for crossover in report.crossovers]
    return max(errors) <= LARGEST_ERROR and max(factors, default=1.0) <= LARGEST_FACTOR


def _factor_off(crossover: AlgorithmCrossover) -> float:
    """How many times too large or too small the predicted size is."""
    if crossover.measured_bytes is None:
        return float("inf")
    ratio = crossover.predicted_bytes / crossover.measured_bytes
    return max(ratio, 1 / ratio)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", default="50mbit", help="as tc writes it")
    parser.add_argument("--delay-ms", type=float, default=5.0, help="one way; 0 for none")
    parser.add_argument("--kind", action="append", choices=COLLECTIVES)
    parser.add_argument("--sizes", default=SIZES, help="bytes, separated by commas")
    parser.add_argument("--seconds", type=float, default=120.0, help="for each collective")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for everything")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
