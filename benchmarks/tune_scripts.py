"""`stepscope tune` on the CPU scripts of tests/tune: what it keeps, and what a remedy costs to try.

python benchmarks/tune_scripts.py [--scripts NAME,NAME] [--budget 10m] [--steps 60] [--out DIR]

A row is printed as soon as its script is done. With --out the tunes are kept, and a script whose
tune is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests/tune"))
from script_files import SCRIPTS, TrainingScript

_COLUMNS = "{:<18} {:>9} {:>9} {:>6} {:>7} {:>6} {:>7} {:>8}  {}"
HEAD = _COLUMNS.format(
    "script", "before ms", "after ms", "gain", "tried", "runs", "run s", "remedy s", "kept"
)


@dataclass(frozen=True, slots=True)
class TunedScript:
    """One script's tune: its answer and how long each of its runs took."""

    name: str
    answer: dict[str, Any]
    runs_s: list[float]

    @property
    def tried(self) -> set[str]:
        return {remedy for trial in self.answer["trials"] for remedy in trial["remedies"]}

    def row(self) -> str:
        answer, tried = self.answer, len(self.tried)
        return _COLUMNS.format(
            self.name,
            _number(answer["baseline_ms"]),
            _number(answer["best_ms"]),
            _number(answer["speedup"]),
            tried,
            len(self.runs_s),
            _number(median(self.runs_s) if self.runs_s else None),
            _number(sum(self.runs_s) / tried if tried else None),
            ", ".join(answer["kept"]) or "nothing",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scripts", default=",".join(SCRIPTS))
    parser.add_argument("--budget", default="10m")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--skip", default="", help="remedies that are not tried")
    parser.add_argument("--out", type=Path, help="keep the tunes in this folder")
    parser.add_argument("--json", type=Path, help="write every answer to this file")
    chosen = parser.parse_args()
    names = [name for name in chosen.scripts.split(",") if name]
    if unknown := set(names) - set(SCRIPTS):
        parser.error(f"there is no script {', '.join(sorted(unknown))}: {', '.join(SCRIPTS)}")
    options = ["--steps", str(chosen.steps), "--budget", chosen.budget]
    options += ["--skip", chosen.skip] if chosen.skip else []
    answers = {}
    print(HEAD)
    with tempfile.TemporaryDirectory() as temporary:
        home = chosen.out or Path(temporary)
        for name in names:
            tuned = tune(SCRIPTS[name], home / name, options)
            if tuned is not None:
                print(tuned.row(), flush=True)
                answers[name] = {"answer": tuned.answer, "runs_s": tuned.runs_s}
    if chosen.json:
        chosen.json.write_text(json.dumps({"schema": 1, "scripts": answers}, indent=1) + "\n")
    if len(answers) < len(names):
        sys.exit(1)


def tune(script: TrainingScript, folder: Path, options: list[str]) -> TunedScript | None:
    """None, and why on stderr, if the tune fails: that costs this script only."""
    out = (folder / "tune").absolute()
    if not (out / "tune.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        path = (folder / "train.py").absolute()
        path.write_text(script.text)
        words = ["--quiet", "--json", "--out", str(out), *script.options, *options]
        done = subprocess.run(
            [sys.executable, "-m", "stepscope", "tune", *words, "--", *script.command(path)],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            print(f"{script.name}: {done.stderr.strip()}", file=sys.stderr)
            return None
    answer = json.loads((out / "tune.json").read_text())
    lines = map(json.loads, (out / "journal.jsonl").read_text().splitlines())
    runs_s = [line["took_s"] for line in lines if line["kind"] == "trial"]
    return TunedScript(script.name, answer, runs_s)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
