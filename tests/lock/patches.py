"""Answer which changes fit a training script, and what each of them edits.

scripts/ holds training scripts, each with what its own process saw of it: script.json, as a run
folder has it, with paths that begin where the command ran.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.changes import APPLIED
from stepscope.fix.named_changes import ChosenChange, load_change
from stepscope.records.script_facts import ScriptFacts
from stepscope.ui.tune.patch import make_patch

if TYPE_CHECKING:
    from collections.abc import Iterator

# What these propose depends on the machine that asks.
OF_MACHINE = ("cpu-allocator", "pin-ranks")


def patches(script: Path, device: str) -> str:
    """Return every change that fits with its patch, and the patch of those that go together."""
    content = json.loads(script.read_text())
    with tempfile.TemporaryDirectory() as name:  # a patch's paths begin at the work tree around it
        os.chdir(name)
        Path("train.py").write_text(content["train.py"])
        facts = replace(ScriptFacts.from_json(content["script.json"]), device=device, bf16=True)
        return "\n".join(about(facts, Path(name))).replace(name, "FOLDER")


def about(facts: ScriptFacts, folder: Path) -> list[str]:
    together: dict[str, ChosenChange] = {}
    lines: list[str] = []
    for name in sorted(APPLIED):
        change = load_change(name)
        for value in () if name in OF_MACHINE else change.values_for(facts):
            chosen = replace(change, value=value)
            why_not = change.fix.fits(facts, value)
            lines.append(f"== {chosen}: {why_not or 'fits'}")
            if why_not is None:
                lines += patch_lines(facts, [chosen], folder)
                together.setdefault(chosen.family, chosen)
    lines.append(f"== {', '.join(map(str, together.values()))}")
    return [*lines, *patch_lines(facts, list(together.values()), folder)]


def patch_lines(facts: ScriptFacts, chosen: list[ChosenChange], folder: Path) -> Iterator[str]:
    patch = make_patch(facts, chosen, folder)
    yield patch.diff or "no file changes"
    yield from (f"by hand: {words}" for words in patch.by_hand)
    yield from (f"set {name}={value}" for name, value in sorted(patch.variables.items()))
