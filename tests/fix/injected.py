"""Run small training scripts with a remedy injected, and with its patch made instead.

A test of a remedy needs three lines:

    from injected import assert_patch_trains_the_same, run_injected

    run = run_injected(tmp_path, SCRIPT, "fused-optimizer", "bucket-mb=50")   # a real process
    assert run.did["fused-optimizer"] == ["AdamW: fused=True"]; run.refused; run.losses; run.facts
    assert_patch_trains_the_same(tmp_path, SCRIPT, "fused-optimizer")          # loss for loss

`run_injected(tmp_path, SCRIPT)` without remedies is the baseline. `run_patched` runs the script
unchanged for its facts, makes the edits that the remedies propose in a copy, and runs the copy;
`.source` is its text. `ranks=2` starts the script with torchrun. Scripts train a few steps and end;
they are also ended after `steps` steps. TRAINING is such a script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.fix.named_changes import choose, choose_all
from stepscope.fix.proposal import Proposal, Script, edited
from stepscope.measure.settings import Settings
from stepscope.records.script_facts import ScriptFacts
from stepscope.ui.jobs.environment import capture_variables

if TYPE_CHECKING:
    from collections.abc import Mapping

NEVER = 1_000_000_000
_TIMEOUT_S = 170
_numbers = count()

TRAINING = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(8):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    optimizer.zero_grad()
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRun:
    """What one rank (rank 0 unless asked otherwise) of a run on trial left behind."""

    losses: list[tuple[int, str]]  # step and value, to the last bit
    facts: ScriptFacts
    peak: dict[str, int | None]
    did: dict[str, list[str]]  # by remedy, as it was named
    refused: dict[str, str]
    output: str  # what the script printed
    source: str  # the script as it ran
    folder: Path
    proposal: Proposal = field(default_factory=Proposal)

    @property
    def values(self) -> list[float]:
        return [float.fromhex(value) for _, value in self.losses]


def run_injected(
    tmp_path: Path,
    script: str,
    *remedies: str,
    steps: int = 6,
    ranks: int = 1,
    rank: int = 0,
    variables: Mapping[str, str] | None = None,
) -> TrialRun:
    """Run a script's text with remedies injected."""
    place = _new_place(tmp_path)
    path = place / "train.py"
    path.write_text(script)
    return _run(path, remedies, steps, ranks, rank, variables or {})


def run_patched(
    tmp_path: Path,
    script: str,
    *remedies: str,
    steps: int = 6,
    ranks: int = 1,
    rank: int = 0,
    variables: Mapping[str, str] | None = None,
) -> TrialRun:
    """Run a script's text with the edits that the remedies propose, and nothing injected."""
    plain = run_injected(tmp_path, script, steps=steps, ranks=ranks, rank=rank, variables=variables)
    proposal, text = patch_of(plain, *remedies)
    path = _new_place(tmp_path) / "train.py"
    path.write_bytes(text)
    extra = {**(variables or {}), **proposal.variables}
    return _run(path, (), steps, ranks, rank, extra, proposal)


def patch_of(run: TrialRun, *remedies: str) -> tuple[Proposal, bytes]:
    """What remedies propose for a script that ran, and its text with the edits made."""
    file = next(run.folder.parent.glob("train.py"))
    script = Script(run.facts, _read)
    proposal = Proposal()
    for chosen in choose_all(remedies):
        proposal += chosen.fix.patch(script, chosen.value)
    changed = edited(proposal.edits, _read)
    assert set(changed) <= {str(file)}, "a file that is not the script would be changed"
    return proposal, changed.get(str(file), file.read_bytes())


def assert_patch_trains_the_same(tmp_path: Path, script: str, *remedies: str, **how: Any) -> str:
    """The injected remedies and their patch give the same losses; the patched text is returned."""
    injected = run_injected(tmp_path, script, *remedies, **how)
    patched = run_patched(tmp_path, script, *remedies, **how)
    assert not injected.refused, injected.refused
    assert all(injected.did[str(choose(name))] for name in remedies), injected.did
    assert not patched.proposal.by_hand, patched.proposal.by_hand
    assert patched.source != script or patched.proposal.variables, "nothing was patched"
    assert injected.losses == patched.losses, (injected.values, patched.values, patched.source)
    return patched.source


def _run(
    path: Path,
    remedies: tuple[str, ...],
    steps: int,
    ranks: int,
    rank: int,
    variables: Mapping[str, str],
    proposal: Proposal | None = None,
) -> TrialRun:
    folder = path.parent / "run"
    folder.mkdir()
    settings = Settings(
        folder=str(folder),
        wait=NEVER,
        memory=False,
        sample_hz=0.0,
        remedies=remedies,
        trial=True,
        stop_after=steps,
    )
    users = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [*_python(ranks), str(path)],
        env=capture_variables(settings, users),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return _collect(folder / f"rank-{rank:05}", path, done, proposal or Proposal())


def _python(ranks: int) -> list[str]:
    if ranks == 1:
        return [sys.executable]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *torchrun]


def _collect(
    folder: Path, path: Path, done: subprocess.CompletedProcess[str], proposal: Proposal
) -> TrialRun:
    output = done.stdout + done.stderr
    assert (folder / "trial.json").exists(), f"no step was seen: {output}"
    trial, script, rank = (
        json.loads((folder / name).read_text())
        for name in ("trial.json", "script.json", "rank.json")
    )
    applied = rank.get("remedies", [])
    return TrialRun(
        losses=[(step, value) for step, value in trial["losses"]],
        facts=ScriptFacts.from_json(script),
        peak=trial["peak"],
        did={one["id"]: one["did"] for one in applied},
        refused={one["id"]: one["refused"] for one in applied if one["refused"]},
        output=output,
        source=path.read_text(),
        folder=folder.parent,
        proposal=proposal,
    )


def _new_place(tmp_path: Path) -> Path:
    place = tmp_path / f"script-{next(_numbers)}"
    place.mkdir()
    return place


def _read(file: str) -> bytes | None:
    try:
        return Path(file).read_bytes()
    except OSError:
        return None
