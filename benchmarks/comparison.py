"""Are the intervals of `compare` as wide as they should be? Same against same, and true changes.

    python benchmarks/comparison.py [--comparisons 500] [--seed 0] [--only NAME]
                                    [--bootstrap] [--block 25] [--mean]

Every number of the first table is the share of comparisons of two runs of one workload that report
"no difference seen": 95 is right, below 93 the interval is too narrow, above 97 too wide. Marked
cells are outside that band; one standard deviation of a cell is 1 with 500 comparisons. The lists
called "unseen" played no part in choosing the method. `--bootstrap` adds the ordinary block
bootstrap's percentile interval. `--mean` prints the first table for means instead of medians, with
steps that stall; its last column is runs of 300 against runs of 3000.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from series import (
    BLOCK,
    MADE,
    STALLS,
    Floats,
    Maker,
    correlated,
    drawn_again,
    independent,
    real_lists,
    unseen_lists,
)
from stepscope.verify.change import Estimate, mean_ratio, median_ratio
from stepscope.verify.spread import correlation_times
from stepscope.verify.steady import warm_up

LENGTHS = (50, 100, 200, 500, 1000)
MEAN_LENGTHS = ((100, 100), (300, 300), (1000, 1000), (300, 3000))
BAND = (93.0, 97.0)
Method = Callable[[Floats, Floats], tuple[float, float]]


def main() -> None:
    options = _options()
    if options.mean:
        _print_means(options.comparisons, options.seed, options.only or "")
        return
    lists = real_lists() | {f"unseen: {name}": steps for name, steps in unseen_lists().items()}
    makers = MADE | {name: drawn_again(steps, options.block) for name, steps in lists.items()}
    makers = {name: make for name, make in makers.items() if (options.only or "") in name}
    methods: dict[str, Method] = {"compare": by_compare}
    if options.bootstrap:
        methods["block bootstrap"] = by_bootstrap
    for name, method in methods.items():
        print(f"\nno difference seen, % of {options.comparisons} same against same: {name}")
        print(f"{'':27}" + "".join(f"{steps:>8}" for steps in LENGTHS) + f"{'its own':>9}")
        for number, (kind, make) in enumerate(makers.items()):
            lengths = [*LENGTHS, *([len(lists[kind])] if kind in lists else [])]
            seeds = [(options.seed, number, steps) for steps in lengths]
            cells = [_cell(_unchanged(make, options.comparisons, method, seed)) for seed in seeds]
            print(f"{kind:27}" + "".join(cells), flush=True)
    if not options.only:
        _print_changes(options.comparisons, options.seed)
        _print_starts(options.comparisons, options.seed)
    print(f"\n{time.process_time():.0f} s of processor time")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--comparisons", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block", type=int, default=BLOCK, help="in which real lists are drawn")
    parser.add_argument("--only", help="series with this in their name, and only the first table")
    parser.add_argument("--bootstrap", action="store_true")
    parser.add_argument("--mean", action="store_true", help="the first table, for means")
    return parser.parse_args()


def _print_means(comparisons: int, seed: int, only: str) -> None:
    lists = real_lists() | {f"unseen: {name}": steps for name, steps in unseen_lists().items()}
    makers = STALLS | MADE | {name: drawn_again(steps) for name, steps in lists.items()}
    print(f"no difference seen, % of {comparisons} same against same: means")
    print(f"{'':27}" + "".join(f"{a:>6},{b:<6}" for a, b in MEAN_LENGTHS))
    for number, (name, make) in enumerate(makers.items()):
        if only not in name:
            continue
        cells = []
        for lengths in MEAN_LENGTHS:
            rng = np.random.default_rng((seed, number, *lengths))
            a, b = (make(rng, comparisons, steps) for steps in lengths)
            silent = [_no_difference(x, y) for x, y in zip(a, b, strict=True)]
            cells.append(100 * float(np.mean(silent)))
        print(f"{name:27}" + "".join(f"{cell:>9.1f}    " for cell in cells), flush=True)


def _no_difference(a: Floats, b: Floats) -> bool:
    estimate = mean_ratio([a], [b])
    return estimate.low <= 0 <= estimate.high


def by_compare(a: Floats, b: Floats) -> tuple[float, float]:
    estimate = _compared(a, b)
    return estimate.low, estimate.high


def _compared(a: Floats, b: Floats) -> Estimate:
    return median_ratio([a[warm_up(a) :]], [b[warm_up(b) :]])


def by_bootstrap(a: Floats, b: Floats, draws: int = 400) -> tuple[float, float]:
    """Circular blocks as long as the correlation lasts; percentiles of the ratio of medians."""
    rng = np.random.default_rng(0)
    medians = []
    for steps in (np.log(a), np.log(b)):
        n = len(steps)
        tau = float(correlation_times(np.sign(steps - np.median(steps))[None])[0][0])
        block = int(min(max(1, round((1.5 * n) ** (1 / 3) * max(tau - 1, 0) ** (2 / 3))), n // 3))
        starts = rng.integers(0, n, (draws, -(-n // block)))
        places = ((starts[:, :, None] + np.arange(block)) % n).reshape(draws, -1)[:, :n]
        medians.append(np.median(steps[places], axis=1))
    low, high = np.quantile(medians[1] - medians[0], (0.025, 0.975))
    return float(low), float(high)


def _unchanged(make: Maker, comparisons: int, method: Method, seed: tuple[int, int, int]) -> float:
    """Percent of intervals that contain zero; the seed ends with the number of steps."""
    rng, steps = np.random.default_rng(seed), seed[-1]
    a, b = make(rng, comparisons, steps), make(rng, comparisons, steps)
    inside = [low <= 0 <= high for low, high in map(method, a, b)]
    return 100 * float(np.mean(inside))


def _cell(percent: float) -> str:
    mark = " " if BAND[0] <= percent <= BAND[1] else "*"
    return f"{percent:>7.1f}{mark}"


def _print_changes(comparisons: int, seed: int) -> None:
    print(f"\na true change is found, % of {comparisons}; 200 steps on each side, 2% noise")
    shares = (0.005, 0.01, 0.02, 0.03, 0.05)
    print(
        f"{'':27}" + "".join(f"{share:>8.1%}" for share in shares) + f"{'smallest':>10}{'of it':>8}"
    )
    for name, make in (
        ("independent", independent),
        ("correlated 0.5", correlated(0.5)),
        ("correlated 0.9", correlated(0.9)),
    ):
        rng = np.random.default_rng((seed, 1))
        a, b = make(rng, comparisons, 200), make(rng, comparisons, 200)
        cells = [_found(a, b * (1 + share)) for share in shares]
        smallest = float(np.median([_compared(x, y).smallest for x, y in zip(a, b, strict=True)]))
        cells.append(_found(a, b * np.exp(smallest)))
        told = "".join(f"{cell:>8.1f}" for cell in cells[:-1])
        print(f"{name:27}{told}{smallest:>10.2%}{cells[-1]:>8.1f}", flush=True)


def _found(a: Floats, b: Floats) -> float:
    return 100 * float(np.mean([low > 0 for low, _ in map(by_compare, a, b)]))


def _print_starts(comparisons: int, seed: int) -> None:
    print(f"\nno difference seen, % of {comparisons}: several starts a side, 100 steps each")
    print(f"{'between starts':27}" + "".join(f"{runs:>4} runs{'paired':>8}" for runs in (2, 3, 5)))
    for between in (0.0, 0.005, 0.02):
        rng = np.random.default_rng((seed, 2))
        cells = []
        for runs in (2, 3, 5):
            a, b = (_starts(rng, comparisons, runs, between) for _ in range(2))
            for paired in (False, True):
                found = [median_ratio([*x], [*y], paired=paired) for x, y in zip(a, b, strict=True)]
                cells.append(_cell(100 * float(np.mean([e.low <= 0 <= e.high for e in found]))))
        print(f"{between:<27.1%}" + "".join(cells), flush=True)


def _starts(rng: np.random.Generator, rows: int, runs: int, between: float) -> Floats:
    steps = correlated(0.5)(rng, rows * runs, 100).reshape(rows, runs, 100)
    return steps * np.exp(between * rng.standard_normal((rows, runs, 1)))


if __name__ == "__main__":
    main()
