"""What stepscope says of public scripts, beside what changing those scripts gives.

python benchmarks/field_answers.py FOLDER --out OUT [--only NAME ...] [--rounds 2] [--prefix quiet]
python benchmarks/field_answers.py FOLDER --out OUT --table

FOLDER is the one of field.py, with the data of field_more_data.py; field_more.toml lists the
scripts. Each runs once under `stepscope run`, then bare: as it is and with each change, in turns.
With --next, what `next` advises is tried with `stepscope run --with` where stepscope can apply it.
OUT gets one JSON file a script; what is there already is not measured again, and with --again only
stepscope is asked again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from field_scripts import Script, choose, read_scripts
from field_trial import (
    COUNTER,
    NoTrialError,
    epoch_times,
    prepare,
    run_copy,
    step_times,
    why_failed,
)
from process import environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from field_trial import Ended

LIST = Path(__file__).with_name("field_more.toml")
LOADER_WORKERS = (0, 1, 2, 4)
OURS = (sys.executable, "-m", "stepscope")
AS_IT_IS = "as it is"
TWICE = "twice the batch"
_FIRST_STEPS = 0.1  # of the steps, and at least five, are left out as the start

# A change is a list of [place, old, new]: the place is "command", "env:NAME" or a file of the copy.
Change = list[list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Script):
    """A public script, and the changes that show whether what stepscope says of it is true."""

    steps: int | str = 0  # stepscope's count is compared with the counter's
    kind: str = ""
    twice: Change = field(default_factory=list)  # doubles the batch
    workers: Change = field(default_factory=list)  # {workers} stands for their number
    tries: dict[str, Change] = field(default_factory=dict)  # in words -> the change


def main() -> None:
    chosen = _arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    questions = choose(read_scripts(chosen.list, Question), chosen.only)
    chosen.out.mkdir(parents=True, exist_ok=True)
    out = chosen.out.absolute()
    if chosen.table:
        from field_answers_table import table

        print(table([(q, _saved(q, out)) for q in questions]))
        return
    prefix = shlex.split(chosen.prefix)
    for question in questions:
        if chosen.again:
            _forget_what_was_said(question, out)
        try:
            answer(
                question,
                chosen.folder.absolute(),
                out,
                rounds=chosen.rounds,
                prefix=prefix,
                tries_next=chosen.next,
            )
        except NoTrialError as problem:
            print(f"{question.name}: {problem}", flush=True)
        else:
            print(_line(question, _saved(question, out)), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="holds the repositories as owner/name")
    parser.add_argument("--out", type=Path, required=True, help="answers and run folders go here")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these scripts alone")
    parser.add_argument("--list", type=Path, default=LIST, help="the list of scripts")
    parser.add_argument("--rounds", type=int, default=2, help="bare runs of each change")
    parser.add_argument("--prefix", default="", help="a command that starts every run, as `nice`")
    parser.add_argument("--next", action="store_true", help="try what `next` advises, too")
    parser.add_argument(
        "--again", action="store_true", help="explain the runs again, keep the times"
    )
    parser.add_argument("--table", action="store_true", help="print the saved answers as a table")
    return parser.parse_args()


def answer(
    question: Question,
    folder: Path,
    out: Path,
    *,
    rounds: int,
    prefix: Sequence[str],
    tries_next: bool,
) -> None:
    """Ask stepscope and measure; every run's result is saved as soon as it is there."""
    saved = _saved(question, out)
    place = out / question.name
    if "captured" not in saved:
        saved["captured"] = _capture(question, folder, place, prefix)
        _save(question, out, saved)
    if "explained" not in saved:
        saved["explained"] = _ask(question, place)
        _save(question, out, saved)
    if tries_next and "next_tried" not in saved:
        saved["next_tried"] = _try_next(question, saved["explained"], folder, place, prefix)
        _save(question, out, saved)
    changes = variants(question)
    measured = saved.setdefault("measured", {})
    for number in range(rounds):
        for name in list(changes)[:: -1 if number % 2 else 1]:
            results = measured.setdefault(name, [])
            if len(results) <= number:
                changed = changed_script(question, changes[name])
                results.append(_measure(changed, folder, place, prefix))
                _save(question, out, saved)


def variants(question: Question) -> dict[str, Change]:
    """Every change that is measured, by name; the script as it is comes first."""
    changes: dict[str, Change] = {AS_IT_IS: []}
    if question.twice:
        changes[TWICE] = question.twice
    if question.workers:
        for number in LOADER_WORKERS:
            changes[f"{number} loader workers"] = [
                [place, old, new.replace("{workers}", str(number))]
                for place, old, new in question.workers
            ]
        for name, change in list(changes.items()):  # as many as there are
            if change and all(old == new for _, old, new in change):
                del changes[name]
    return changes | question.tries


def changed_script(question: Question, change: Change) -> Question:
    """The script with one change made."""
    command, env = question.command, dict(question.env)
    edits = {file: list(pairs) for file, pairs in question.edits.items()}
    for place, old, new in change:
        if place == "command":
            if old not in command:
                raise NoTrialError(f"the command does not say {old!r}")
            command = command.replace(old, new)
        elif place.startswith("env:"):
            env[place[4:]] = new
        else:
            edits.setdefault(place, []).append([old, new])
    return replace(question, command=command, env=env, edits=edits)


def _capture(
    question: Question, folder: Path, place: Path, prefix: Sequence[str]
) -> dict[str, Any]:
    """Run the script under stepscope; its run folder stays."""
    shutil.rmtree(place, ignore_errors=True)
    prepare(question, folder, place / "captured")
    words = [*prefix, *OURS, "run", "--out", str(place / "run"), *question.options, "--"]
    words += shlex.split(question.command)
    ended = _finished(run_copy(question, words, folder, place / "captured"))
    ranks = json.loads((place / "run" / "run.json").read_text()).get("ranks", [])
    return {"wall_s": ended.wall_s, "steps": [rank.get("steps") for rank in ranks]}


def _ask(question: Question, place: Path) -> dict[str, Any]:
    """What stepscope says of the run."""
    run = place / "run"
    said = _json_of([*OURS, "explain", "--json", str(run)])
    (place / "explain.json").write_text(json.dumps(said))
    text = subprocess.run(
        [*OURS, "explain", str(run)],
        env=environment(COLUMNS="120"),
        capture_output=True,
        text=True,
        check=False,
    )
    asked = ["batch=x2", *(f"loader-workers={n}" for n in LOADER_WORKERS if question.workers)]
    return {
        "verdict": said.get("verdict"),
        "headline": said.get("headline"),
        "next": said.get("next"),
        "findings": said.get("findings", []),
        "step_ms": (said.get("budget") or {}).get("step_ms"),
        "screen": text.stdout.splitlines()[:40],
        "whatif": {change: _predicted(run, change) for change in asked},
    }


def _try_next(
    question: Question, said: dict[str, Any], folder: Path, place: Path, prefix: Sequence[str]
) -> dict[str, Any] | None:
    """The step with what `next` advises, under stepscope as the step before; None where a person
    has to make the change."""
    from stepscope.changes import APPLIED

    remedy = (said.get("headline") or {}).get("remedy")
    if remedy not in APPLIED:
        return None
    shutil.rmtree(place / "with", ignore_errors=True)
    shutil.rmtree(place / "changed", ignore_errors=True)
    prepare(question, folder, place / "changed")
    words = [*prefix, *OURS, "run", "--with", remedy, "--no-explain", "--out", str(place / "with")]
    words += [*question.options, "--", *shlex.split(question.command)]
    ended = run_copy(question, words, folder, place / "changed")
    changed = _json_of([*OURS, "explain", "--json", str(place / "with")])
    step_ms = (changed.get("budget") or {}).get("step_ms")
    problem = None if ended.code == 0 and step_ms else why_failed(ended)
    return {"remedy": remedy, "step_ms": step_ms, "before_ms": said["step_ms"], "problem": problem}


def _forget_what_was_said(question: Question, out: Path) -> None:
    saved = _saved(question, out)
    if saved.pop("explained", None):
        _save(question, out, saved)


def _predicted(run: Path, change: str) -> dict[str, Any]:
    return _json_of([*OURS, "whatif", str(run), "--set", change, "--json"])


def _json_of(words: Sequence[str]) -> dict[str, Any]:
    """The object that a command prints; what it complains of, if it prints none."""
    answer = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    try:
        value = json.loads(answer.stdout)
    except ValueError:
        return {"problem": answer.stderr.strip()[-500:]}
    return value if isinstance(value, dict) else {}


def _measure(
    question: Question, folder: Path, place: Path, prefix: Sequence[str]
) -> dict[str, Any]:
    """One bare run: its steps' times, without the first ones."""
    home = place / "bare"
    shutil.rmtree(home, ignore_errors=True)
    (home / "counts").mkdir(parents=True)
    prepare(question, folder, home)
    words = [*prefix, *shlex.split(question.command)]
    counts = {"FIELD_COUNTS": str(home / "counts")}
    ended = _finished(run_copy(question, words, folder, home, first=COUNTER, **counts))
    logs = [path.read_text() for path in sorted((home / "counts").iterdir())]
    rows = [row for log in logs if (row := _step_row(step_times(log), epoch_times(log)))]
    if not rows:
        raise NoTrialError("no process made ten steps")
    return {
        "steps": [row["steps"] for row in rows],
        "mean_ms": fmean(row["mean_ms"] for row in rows),
        "within_ms": fmean(row["within_ms"] for row in rows),
        "median_ms": fmean(row["median_ms"] for row in rows),
        "wall_s": ended.wall_s,
    }


def _step_row(times: Sequence[int], epochs: Sequence[int]) -> dict[str, Any] | None:
    """Mean, median, and the mean within epochs of a process's steps; None with too few steps."""
    if len(times) < 10:
        return None
    kept = list(pairwise(times))[max(5, round(_FIRST_STEPS * len(times))) :]
    gaps = [(later - earlier) / 1e6 for earlier, later in kept]
    within = [
        gap
        for gap, (earlier, later) in zip(gaps, kept, strict=True)
        if not any(earlier < began < later for began in epochs)
    ]
    return {
        "steps": len(times),
        "mean_ms": fmean(gaps),
        "within_ms": fmean(within or gaps),
        "median_ms": median(gaps),
    }


def _finished(ended: Ended) -> Ended:
    if ended.code != 0:
        raise NoTrialError("over its time limit" if ended.code is None else why_failed(ended))
    return ended


def _saved(question: Question, out: Path) -> dict[str, Any]:
    """What is saved of this row; nothing if the row has changed since (tries may be added)."""
    row = repr(replace(question, twice=[], workers=[], tries={}, note="", kind=""))
    try:
        saved = json.loads((out / f"{question.name}.json").read_text())
    except (OSError, ValueError):
        saved = {}
    return saved if saved.get("row") == row else {"row": row}


def _save(question: Question, out: Path, saved: dict[str, Any]) -> None:
    (out / f"{question.name}.json").write_text(json.dumps(saved, indent=1) + "\n")


def _line(question: Question, saved: dict[str, Any]) -> str:
    cells = ", ".join(
        f"{name} {median(r['mean_ms'] for r in results):.3g} ms"
        for name, results in saved.get("measured", {}).items()
        if results
    )
    return f"{question.name}: {saved['explained']['verdict']}\n    {cells}"


if __name__ == "__main__":
    main()
