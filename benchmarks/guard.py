"""Fail when stepscope needs more than 10% more processor time than it did.

    python benchmarks/guard.py --since REF [--ours SRC] [--turns N]

Both versions of src run in turns on the same interpreter. The figure is the least processor time of
a command: neighbours only add to it. What seems worse is measured again before it counts.
"""

from __future__ import annotations

import argparse
import gzip
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from statistics import median

from big_trace import repeated
from process import environment, run

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests/golden"
WORSE = 1.1
_TRACE_BYTES = 20_000_000
_ROUNDS = 3  # of turns, for what seems worse
_TIMEOUT_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--since", required=True, help="a tag, a commit, or a folder with stepscope"
    )
    parser.add_argument("--ours", type=Path, default=ROOT / "src", help="a folder with stepscope")
    parser.add_argument("--only", default="", help="figures whose name has this word")
    parser.add_argument("--turns", type=int, default=4)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = Path(chosen.since)
        if not (before / "stepscope").is_dir():
            before = folder / "src"
            if not check_out(chosen.since, folder):
                print(f"bench-guard: skipped, {chosen.since} is not in this clone")
                return 0
        trace = folder / "trace.json"
        trace.write_bytes(b"".join(repeated(_source(), _TRACE_BYTES)))
        guard = Guard((before, chosen.ours), folder, chosen.turns)
        figures = {k: v for k, v in commands(trace).items() if chosen.only in k}
        print(f"processor time since {chosen.since}, in turns")
        worse = [name for name, words in figures.items() if not guard.holds(name, words)]
    if worse:
        print(f"more than {WORSE - 1:.0%} worse: {', '.join(worse)}")
    return bool(worse)


def commands(trace: Path) -> dict[str, tuple[str, ...]]:
    small = str(GOLDEN / "h200-resnet18")
    return {
        "--help": ("--help",),
        "explain a small run": ("explain", small, "--no-cache"),
        "read and explain 20 MB": ("explain", str(trace), "--no-cache", "--json"),
        "second open": ("explain", str(trace)),
        "what-ifs": ("whatif", small, "--no-cache"),
        "two ranks": ("explain", str(GOLDEN / "cpu-two-ranks"), "--no-cache"),
    }


def check_out(ref: str, folder: Path) -> bool:
    """Write src as it was at `ref`; False if this clone does not have it."""
    command = ["git", "-C", str(ROOT), "archive", ref, "src"]
    done = subprocess.run(command, capture_output=True, check=False)
    if not done.returncode:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
    return not done.returncode


class Guard:
    """Measure one command of two versions in turns."""

    def __init__(self, versions: tuple[Path, Path], folder: Path, turns: int) -> None:
        self._versions, self._turns = versions, turns
        self._folders = [folder / name for name in ("before", "now")]

    def holds(self, name: str, words: tuple[str, ...]) -> bool:
        """Whether the command needs about as little as before."""
        taken: list[tuple[float, float]] = []
        for _ in range(_ROUNDS):
            if not taken:
                self._turn(words)  # compiles the modules, fills the cache
            taken += [self._turn(words) for _ in range(self._turns)]
            before, now = (min(times) for times in zip(*taken, strict=True))
            if not is_worse(taken):
                break
        print(f"  {name:<24} {before:7.3f} s  now {now:7.3f} s  {now / before:5.2f}", flush=True)
        return not is_worse(taken)

    def _turn(self, words: tuple[str, ...]) -> tuple[float, float]:
        before, now = map(self._cpu_s, self._versions, self._folders, [words] * 2)
        return before, now

    def _cpu_s(self, source: Path, own: Path, words: tuple[str, ...]) -> float:
        homes = {f"XDG_{name}_HOME": str(own) for name in ("CACHE", "CONFIG", "DATA", "STATE")}
        env = environment(PYTHONPATH=str(source), STEPSCOPE_CACHE_DIR=None, **homes)
        command = (sys.executable, "-m", "stepscope", *words)
        done = run(command, env, keep_output=False, timeout_s=_TIMEOUT_S)
        if done.failure:
            raise SystemExit(f"{source}: stepscope {' '.join(words)} failed: {done.failure}")
        return done.cpu_s


def is_worse(taken: list[tuple[float, float]]) -> bool:
    """Whether the least times and the usual turn agree that it became slower."""
    before, now = (min(times) for times in zip(*taken, strict=True))
    return now > WORSE * before and median(b / a for a, b in taken) > WORSE


def _source() -> bytes:
    return gzip.decompress((GOLDEN / "h200-resnet18/rank-00000/trace.json.gz").read_bytes())


if __name__ == "__main__":
    sys.exit(main())
