"""Plant hangs of every kind, and count how often `stepscope hang` names rank and line.

    python benchmarks/hangs.py [--runs 60] [--healthy 60] [--at-once 3]

Prints a row for each run: right or wrong, seconds from the hang to the sentence that `run` prints
(`--hang-after` is 3 s), and what it said. Healthy runs pause for 9 s: nobody may be accused.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests/hang"), str(ROOT / "src")]

from plant import HANGS, HEALTHY, Plant, play, play_healthy  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--healthy", type=int, default=60)
    parser.add_argument("--at-once", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folders = (Path(name) / str(number) for number in itertools.count())
        plants = list(itertools.islice(itertools.cycle(HANGS), options.runs))
        kinds = list(itertools.islice(itertools.cycle(HEALTHY), options.healthy))
        with ThreadPoolExecutor(options.at_once) as pool:
            rows = list(pool.map(_hang, plants, [next(folders) for _ in plants]))
            fine = list(pool.map(_healthy, kinds, [next(folders) for _ in kinds]))
    right = [took for is_right, took in rows if is_right]
    times = [took for took in right if took is not None]
    print(f"\nhangs: {len(right)} of {len(rows)} right", end="")
    if times:
        print(
            f"; the answer came after {median(times):.1f} s (median), {max(times):.1f} s (longest)"
        )
    print(f"healthy: {sum(fine)} of {len(fine)} accused nobody")


def _hang(plant: Plant, folder: Path) -> tuple[bool, float | None]:
    outcome = play(plant, folder)
    is_right = outcome.is_right(plant)
    took = f"{outcome.after_s:5.1f} s" if outcome.after_s is not None else "   -   "
    words = outcome.answer.get("verdict")
    print("right" if is_right else "WRONG", f"{plant.name:<26}", took, words, flush=True)
    return is_right, outcome.after_s


def _healthy(kind: str, folder: Path) -> bool:
    outcome = play_healthy(kind, folder)
    accused = outcome.answer.get("is_hang") or outcome.said
    words = outcome.said or outcome.answer.get("verdict")
    print("WRONG" if accused else "right", f"{kind:<26}", words, flush=True)
    return not accused


if __name__ == "__main__":
    main()
