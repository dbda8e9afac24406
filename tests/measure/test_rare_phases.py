"""One script that evaluates, saves, collects garbage and compiles: its own clock against ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import get_ident
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stepscope.measure.hooks import _watch_saving
from stepscope.measure.steps.phases import ENTER, LEAVE
from stepscope.records.rank import ALL_PHASES

SCRIPT = Path(__file__).parent / "scripts" / "rare_phases.py"
EPOCH = 6  # steps
EPOCHS = (EPOCH, 2 * EPOCH)  # the steps that begin one, after the first


def call(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=280, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captured once for all tests. No window opens, so that nothing of ours is in a meter."""
    folder = tmp_path_factory.mktemp("rare")
    ours = ("-m", "stepscope", "run", "--no-explain", "--wait", "100", "--out", str(folder / "run"))
    command = (sys.executable, str(SCRIPT), str(folder / "saved.safetensors"))
    (folder / "printed.json").write_text(call(*ours, "--", *command))
    return folder


@pytest.fixture
def rank(folder: Path) -> Path:
    return folder / "run" / "rank-00000"


@pytest.fixture
def rows(rank: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (rank / "steps.jsonl").read_text().splitlines()]


@pytest.fixture
def printed(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "printed.json").read_text())
    return found


def within(ours: int, theirs: int) -> bool:
    """Our notes lie just inside the script's; on a busy machine, something may run in between."""
    return 0.4 * theirs <= ours <= theirs


@pytest.mark.parametrize("phase", ["evaluation", "checkpoint", "gc", "compile"])
def test_a_rare_phase_is_noted_in_its_step_and_nowhere_else(
    rows: list[dict[str, Any]], printed: dict[str, Any], phase: str
) -> None:
    theirs = {int(step): ns for step, ns in printed["spent"][phase].items()}
    ours = {row["step"]: row.get(f"{phase}_ns", 0) for row in rows[1:]}
    if phase == "gc":  # the heap is built inside the script's own time, and Python may collect more
        assert 0 < ours[8] <= theirs[8]
        return
    for step, ns in theirs.items():
        assert within(ours[step], ns), (step, ours[step], ns)
    elsewhere = {step for step, ns in ours.items() if ns} - {*theirs}
    assert elsewhere <= ({*EPOCHS} if phase == "evaluation" else set())


def test_graphs_are_counted_even_after_a_reset(rows: list[dict[str, Any]]) -> None:
    assert {row["step"]: row["graphs"] for row in rows if "graphs" in row} == {9: 2, 10: 1}


def test_the_time_between_epochs_is_what_the_scripts_meters_leave_out(
    rows: list[dict[str, Any]], printed: dict[str, Any]
) -> None:
    """Workers persist, the loaders are zipped, and parts of the model never train."""
    assert [row["step"] for row in rows if "epoch_gap_ns" in row] == [*EPOCHS]
    for step in EPOCHS:
        assert within(printed["spent"]["between"][str(step)], rows[step]["epoch_gap_ns"])
        assert within(rows[step]["evaluation_ns"], printed["spent"]["between"][str(step)])
        assert rows[step]["between_epochs_ns"] >= 30_000_000
    # Both measure from the end of a step's optimizer to the next one's, give or take some lines.
    ours = sum(row["wall_ns"] - row.get("epoch_gap_ns", 0) for row in rows[1:])
    assert ours == pytest.approx(sum(printed["meters"][1:]), rel=0.15)


def test_a_step_knows_how_large_its_batches_were(rows: list[dict[str, Any]]) -> None:
    """Of both loaders: 4 to 9 rows of 8 numbers, and 4 rows."""
    elements = [row["elements"] for row in rows]
    assert elements == [(4 + number + 4) * 8 for number in range(EPOCH)] * 3


def test_phases_add_up(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert sum(row.get(f"{phase}_ns", 0) for phase in ALL_PHASES) == row["wall_ns"]


def test_losses_are_the_same_without_capture(folder: Path, printed: dict[str, Any]) -> None:
    bare = json.loads(call(str(SCRIPT), str(folder / "again.safetensors")))
    assert printed["losses"] == bare["losses"]


def test_the_rank_says_when_it_started_and_what_it_counts(rank: Path) -> None:
    facts = json.loads((rank / "rank.json").read_text())
    assert facts["problems"] == []
    start = facts["start_up"]
    marks = ("began", "torch", "first_request", "first_batch", "first_backward")
    times = [start[f"{mark}_unix_ns"] for mark in marks]
    assert times == sorted(times)
    assert facts["counters"]["memory"] == "host"
    after = facts["after_last_step"]
    assert after["evaluation_ns"] >= 60_000_000


def test_memory_is_the_resident_set_on_a_machine_without_a_device(
    rows: list[dict[str, Any]],
) -> None:
    sizes = [row["allocated_bytes"] for row in rows if "allocated_bytes" in row]
    assert sizes
    assert min(sizes) > 50 << 20


@pytest.mark.parametrize("name", ["dump", "Trainer.save", "Trainer.absent"])
def test_functions_and_methods_that_save_are_noted(name: str) -> None:
    class Trainer:
        def save(self) -> int:
            return 7

    module: Any = ModuleType("saves")
    module.Trainer, module.dump = Trainer, lambda: 7
    session: Any = SimpleNamespace(notes=[], thread=get_ident(), note_from_here=list)
    _watch_saving(session, name, module)
    assert (module.dump(), Trainer().save()) == (7, 7)
    noted = [] if name == "Trainer.absent" else [(ENTER, "checkpoint"), (LEAVE, "checkpoint")]
    assert [(what, phase) for what, _, phase in session.notes] == noted
