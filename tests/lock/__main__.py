"""Hold every answer of stepscope still while its code moves.

    make lock                                     record the answers of the code as it is
    make lock-check                               ask again and show what differs
    PYTHONPATH=tests python -m lock check --only WORD

The inputs are the golden traces and runs, runs/ beside this file and damaged copies of both. Traces
that lie in ../shared are asked about as well where they exist. locked.tsv keeps a digest of every
answer. The answers themselves go to .cache/lock, so that a check can show what differs.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from lock.answers import Answer, answer
from lock.corpus import questions

HERE = Path(__file__).parent
LOCKED = HERE / "locked.tsv"
KEPT = HERE.parent.parent / ".cache/lock"
MOST_LINES = 12  # of a difference


def main() -> int:
    parser = argparse.ArgumentParser(prog="lock")
    parser.add_argument("what", choices=("record", "check"))
    parser.add_argument("--only", default="", help="questions whose name has this word")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        isolate(Path(folder))
        asked = [one for one in questions(Path(folder)) if options.only in one.name]
        with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
            answers = list(pool.map(answer, asked, chunksize=4))
    answers.sort(key=lambda one: one.name)
    if options.what == "record":
        record(answers, whole=not options.only)
        return 0
    return check(answers, whole=not options.only)


def isolate(folder: Path) -> None:
    """Answer without this machine's caches, profiles and records."""
    for name in ("CACHE", "CONFIG", "DATA", "STATE"):
        os.environ[f"XDG_{name}_HOME"] = str(folder / name.lower())
    for name in [name for name in os.environ if name.startswith("STEPSCOPE_")]:
        del os.environ[name]


def record(answers: list[Answer], *, whole: bool) -> None:
    lines: dict[str, str] = {}
    if whole:
        shutil.rmtree(KEPT, ignore_errors=True)
    else:
        lines = {line.partition("\t")[0]: line for line in LOCKED.read_text().splitlines()}
    for one in answers:
        keep(KEPT, one)
        lines[one.name] = f"{one.name}\t{one.exit_code}\t{one.digest}"
    LOCKED.write_text("".join(f"{lines[name]}\n" for name in sorted(lines)))
    print(f"{len(answers)} answers recorded")


def keep(folder: Path, one: Answer) -> Path:
    file = folder / one.name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(one.text)
    return file


def check(answers: list[Answer], *, whole: bool) -> int:
    locked = dict(line.split("\t", 1) for line in LOCKED.read_text().splitlines())
    now = {one.name: f"{one.exit_code}\t{one.digest}" for one in answers}
    differ = [one for one in answers if locked.get(one.name) != now[one.name]]
    here = {name for name in locked if not name.startswith("shared/")} if whole else set()
    missing = sorted(here - now.keys())
    for one in differ:
        show(one)
    for name in missing:
        print(f"missing: {name}")
    print(f"{len(answers)} answers, {len(differ)} differ, {len(missing)} missing")
    return bool(differ or missing)


def show(one: Answer) -> None:
    before = KEPT / one.name
    print(f"differs: {one.name} (exit {one.exit_code})")
    after = keep(KEPT.with_name("lock-now"), one)
    if not before.exists():
        return
    lines = difflib.unified_diff(
        before.read_text().splitlines(), one.text.splitlines(), str(before), str(after), "", "", 0
    )
    for line in list(lines)[2 : 2 + MOST_LINES]:
        print(f"  {line[:200]}")


if __name__ == "__main__":
    sys.exit(main())
