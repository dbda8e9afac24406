"""Public training scripts under `stepscope run`: are all steps seen, and does nothing else change?

python benchmarks/field.py FOLDER [--only NAME ...] [--json FILE] [--check]

FOLDER holds clones of the repositories as owner/name, `data` (field_data.py makes it) and, where
packages are missing here, `site`. field.toml lists the scripts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from field_scripts import LIST, choose, read_scripts
from field_trial import try_script

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from field_trial import Trial

_NAME = 26
_HEAD = f"{'script':{_NAME}} {'seen':>9} {'own':>5} {'counted':>9} {'exit':>5} {'loss':>5} " + (
    f"{'trace':>5} {'s':>5} {'with':>5} {'step ms':>8} {'bare':>7}  verdict"
)


def main() -> None:
    chosen = _arguments()
    if not chosen.folder.is_dir():
        raise SystemExit(f"{chosen.folder}: no such folder; it should hold clones as owner/name")
    scripts = choose(read_scripts(chosen.list), chosen.only)
    folder = chosen.folder.absolute()
    work = (chosen.work or Path(tempfile.mkdtemp(prefix="field-"))).absolute()
    print(_HEAD)
    trials = []
    for script in scripts:
        trials.append(try_script(script, folder, work, again=chosen.again))
        print(line(trials[-1]), flush=True)
    print(f"{summary(trials)}; outputs and run folders are in {work}")
    if chosen.json:
        rows = [{**asdict(trial), "right": trial.right} for trial in trials]
        chosen.json.write_text(json.dumps({"schema": 1, "scripts": rows}, indent=1) + "\n")
    if chosen.check and not all(trial.right for trial in trials):
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="holds the repositories as owner/name")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these scripts alone")
    parser.add_argument("--list", type=Path, default=LIST, help="the list of scripts")
    parser.add_argument("--work", type=Path, help="where copies and run folders go")
    parser.add_argument("--again", action="store_true", help="use --work's earlier bare runs")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    parser.add_argument("--check", action="store_true", help="exit 1 unless every row is right")
    return parser.parse_args()


def line(trial: Trial) -> str:
    """One script."""
    name = f"{trial.name:{_NAME}}"
    if trial.problem:
        return f"{name} {trial.problem}"
    cells = (
        f"{_several(trial.seen_steps):>9}",
        f"{_number(trial.own_steps):>5}",
        f"{_several(trial.counted_steps):>9}",
        f"{_number(trial.bare_code)}/{_number(trial.captured_code)}".rjust(5),
        {True: "same", False: "OTHER", None: "-"}[trial.same_losses].rjust(5),
        f"{trial.traces}/{trial.ranks}".rjust(5),
        f"{_seconds(trial.bare_s):>5}",
        f"{_seconds(trial.captured_s):>5}",
        f"{_ms(trial.step_ms):>8}",
        f"{_ms(trial.bare_step_ms):>7}",
    )
    verdict = trial.verdict or "; ".join(trial.messages) or "nothing said"
    return " ".join((name, *cells)) + f"  {'' if trial.right else 'WRONG: '}{verdict}"


def summary(trials: Sequence[Trial]) -> str:
    tried = [trial for trial in trials if trial.problem is None]
    right = sum(trial.right for trial in tried)
    return f"{right} of {len(tried)} scripts right, {len(trials) - len(tried)} could not be tried"


def _several(counts: Iterable[int]) -> str:
    """`20`, `20x2` for two equal counts, `20,21` for different ones, a dash for none."""
    times = Counter(counts)
    return ",".join(f"{n}x{k}" if k > 1 else str(n) for n, k in sorted(times.items())) or "-"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


if __name__ == "__main__":
    main()
