"""Short steps: few are noted in full, all are counted and timed, what is rare is never missed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from stepscope.measure.steps.pace import BUDGET, CREDIT_NS, Pace
from stepscope.measure.steps.phases import (
    ENDED,
    ENTER,
    LEAVE,
    STRETCH,
    UNNOTED,
    Note,
    StepClock,
    Stretch,
)
from stepscope.measure.steps.step_times import StepLines, steps_of_stretch
from stepscope.trace.decode import Oddities
from stepscope.trace.run_folder.follow_run import StepFollower
from stepscope.trace.run_folder.step_files import read_step_columns
from stepscope.trace.run_folder.step_lines import STEP_LINE_FIELDS, StepLine, step_rows

if TYPE_CHECKING:
    from stepscope.records.rank import StepColumns

torch = pytest.importorskip("torch")

MS = 1_000_000


def spent_pace(step_ns: int, own_ns: int) -> Pace:
    """One whose first steps are over: their credit is spent."""
    pace = Pace()
    for _ in range(CREDIT_NS // own_ns + 1):
        pace.noted(step_ns, own_ns)
    return pace


# Which steps are noted.


def test_long_steps_are_all_noted() -> None:
    pace = spent_pace(100 * MS, 50_000)
    assert [pace.next_noted(number) for number in range(10, 20)] == list(range(10, 20))


def test_the_first_steps_are_noted_however_short() -> None:
    pace = Pace()
    pace.noted(100_000, 50_000)
    assert pace.next_noted(1) == 1


@pytest.mark.parametrize("step_ns", [200_000, MS, 3 * MS])
def test_noting_steps_keeps_to_its_budget(step_ns: int) -> None:
    own_ns = 40_000
    pace = spent_pace(step_ns, own_ns)
    numbers = noted_numbers(pace, 20_000)
    share = len(numbers) * own_ns / (20_000 * step_ns)
    assert BUDGET / 4 < share <= BUDGET


def noted_numbers(pace: Pace, last: int) -> list[int]:
    numbers = [pace.next_noted(1)]
    while numbers[-1] < last:
        numbers.append(pace.next_noted(numbers[-1] + 1))
    return [number for number in numbers if number <= last]


def test_ranks_of_other_costs_note_steps_in_common() -> None:
    quick, slow = spent_pace(MS, 20_000), spent_pace(MS, 60_000)
    often, rarely = set(noted_numbers(quick, 5000)), set(noted_numbers(slow, 5000))
    assert rarely < often


def test_noted_steps_have_no_period() -> None:
    """A script that prints every tenth step has a tenth of its noted steps among those."""
    numbers = noted_numbers(spent_pace(MS, 50_000), 40_000)
    for period in (2, 5, 10, 16, 50):
        share = np.mean([number % period == 0 for number in numbers])
        assert share == pytest.approx(1 / period, abs=0.3 / period + 0.01)


def test_the_next_noted_step_is_the_first_of_its_kind_from_anywhere() -> None:
    pace = spent_pace(MS, 50_000)
    numbers = noted_numbers(pace, 3000)
    assert len(numbers) > 10
    for before, after in pairwise(numbers):
        assert {pace.next_noted(number) for number in range(before + 1, after + 1)} == {after}


# From notes to lines.


def stretch(first: int, began: int, *ends: int, noted: bool = True, **more: Any) -> Note:
    at = more.pop("at", ends[-1] if ends else began)
    values = {"unix_ns": 1000 * MS + ends[-1] if ends else 0, "events": None, "reading": None}
    return (STRETCH, at, Stretch(first, began, list(ends), noted=noted, **{**values, **more}))


def ended(at: int, number: int) -> Note:
    return (ENDED, at, (number, 1000 * MS + at, False, None, (), False, None))


def rows_of(*notes: Note) -> dict[int, dict[str, int]]:
    """Steps by their number, as the reader has them."""
    lines = [msgspec.json.decode(text, type=StepLine) for text in StepLines(0)(notes, last=True)]
    columns = dict(zip(STEP_LINE_FIELDS, step_rows(lines), strict=True))
    return {
        int(number): {name: int(values[place]) for name, values in columns.items()}
        for place, number in enumerate(columns["step"])
    }


def test_steps_of_a_stretch_have_their_own_wall_times_and_ends() -> None:
    notes = [ended(2 * MS, 0), stretch(1, 2 * MS, 3 * MS, 5 * MS, 6 * MS), ended(7 * MS, 4)]
    rows = rows_of(*notes)
    assert list(rows) == [0, 1, 2, 3, 4]
    assert [row["wall_ns"] for row in rows.values()] == [2 * MS, MS, 2 * MS, MS, MS]
    ends = [1000 * MS + at * MS for at in (2, 3, 5, 6, 7)]
    assert [row["end_unix_ns"] for row in rows.values()] == ends
    assert [row["unnoted_ns"] > 0 for row in rows.values()] == [False, True, True, True, False]


def test_rounded_walls_still_add_up() -> None:
    ends = [1_000_000 + 333_333 * number for number in range(1, 400)]
    row = rows_of(ended(1_000_000, 0), stretch(1, 1_000_000, *ends))
    total = sum(row[number]["wall_ns"] for number in range(1, 400))
    assert total == pytest.approx(333_333 * 399, abs=1000)
    assert row[7]["wall_ns"] == pytest.approx(333_333, rel=0.002)


def test_a_step_that_is_noted_from_its_middle_adds_up() -> None:
    notes = [
        ended(2 * MS, 0),
        stretch(1, 2 * MS, 3 * MS, noted=False, at=4 * MS),
        (ENTER, 4 * MS, "gc"),
        (LEAVE, 5 * MS, "gc"),
        (ENTER, 6 * MS, "optimizer"),
        (LEAVE, 8 * MS, "optimizer"),
        ended(9 * MS, 2),
    ]
    (_, _, first), _, (_, wall, spent) = StepClock().read(notes)
    assert first["other"] == 2 * MS
    assert wall == 6 * MS
    assert {name: ns // MS for name, ns in spent.items() if ns} == {
        UNNOTED: 2,  # until the collection, and from there to the optimizer
        "gc": 1,
        "optimizer": 2,
        "forward": 1,  # what follows an optimizer in a script without a loader
    }


def test_what_the_system_counted_belongs_to_the_longest_step() -> None:
    reading = (None, (b"0 9000000 0", 7), b"0 100 0")
    before = (None, (b"0 0 0", 0), b"0 100 0")
    notes = [
        (ENDED, MS, (0, MS, False, None, (), False, before)),
        stretch(1, MS, 2 * MS, 9 * MS, 10 * MS, reading=reading),
    ]
    rows = rows_of(*notes)
    assert [rows[number]["cpu_wait_ns"] for number in (1, 2, 3)] == [-1, 9 * MS, -1]
    assert rows[3]["allocated_bytes"] == 100 * os.sysconf("SC_PAGE_SIZE")


# Whole trainings.

SCRIPT = """
import gc, time, sys
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
rows = torch.utils.data.TensorDataset(torch.randn(800, 4), torch.randn(800, 1))
loader = torch.utils.data.DataLoader(rows, batch_size=2)
gc.disable()
steps = 0
for epoch in range(8):
    for inputs, wanted in loader:
        optimizer.zero_grad()
        loss = ((model(inputs) - wanted) ** 2).mean()
        loss.backward()
        if steps == 2100:
            time.sleep(0.3)
        optimizer.step()
        steps += 1
    model.eval()
    with torch.no_grad():
        for inputs, _ in list(loader)[:20]:
            model(inputs)
        time.sleep(0.05)
    model.train()
print("steps", steps, loss.item().hex())
"""


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The run folder, and what the script printed bare and captured."""
    home = tmp_path_factory.mktemp("pace")
    script = home / "train.py"
    script.write_text(SCRIPT)
    bare = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, cwd=home
    )
    run = [sys.executable, "-m", "stepscope", "run", "-o", home / "run", "--"]
    ours = subprocess.run(
        [*run, sys.executable, script], capture_output=True, text=True, check=True, cwd=home
    )
    return home / "run" / "rank-00000", bare.stdout, ours.stdout


@pytest.fixture(scope="module")
def steps(captured: tuple[Path, str, str]) -> StepColumns:
    oddities = Oddities("steps.jsonl")
    columns = read_step_columns(captured[0], oddities)
    assert columns is not None
    assert not oddities.count
    return columns


def test_losses_are_the_same_and_steps_exact(
    captured: tuple[Path, str, str], steps: StepColumns
) -> None:
    folder, bare, ours = captured
    assert bare in ours
    assert len(steps) == 3200
    assert (np.diff(steps.number) == 1).all()
    rank = json.loads((folder / "rank.json").read_text())
    assert rank["steps"] == 3200
    assert rank["problems"] == []
    (use,) = [use for use in rank["data"]["loaders"] if use["trains"]]
    assert use["batches"] >= 3200


def test_few_of_the_short_steps_are_noted(steps: StepColumns) -> None:
    assert 20 < steps.noted.sum() < 0.7 * len(steps)


def test_phases_of_all_steps_stand_for_their_time(steps: StepColumns) -> None:
    phases = sum(steps.phases_ns.values())
    usual = steps.wall_ns < 1.4 * np.median(steps.wall_ns)
    assert phases[usual].sum() == pytest.approx(steps.wall_ns[usual].sum(), rel=0.02)
    assert (phases <= steps.wall_ns).all()


def test_every_evaluation_is_seen(steps: StepColumns) -> None:
    """Seven lie between steps; the last follows all of them."""
    spent = steps.phases_ns["evaluation"]
    assert steps.number[spent > 0].tolist() == [400 * epoch for epoch in range(1, 8)]
    assert (spent[spent > 0] >= 50 * MS).all()


def test_a_long_step_is_seen_and_the_system_asked(steps: StepColumns) -> None:
    assert steps.wall_ns[2100] > 290 * MS
    assert steps.allocated_bytes is not None


def test_a_live_follower_reads_the_same(
    captured: tuple[Path, str, str], steps: StepColumns
) -> None:
    far = StepFollower(captured[0]).read()
    assert far.seen == len(steps)
    assert far.unread == 0
    assert far.wall_ns == int(steps.wall_ns.sum())


def test_a_window_asked_for_in_a_stretch_opens_at_its_step(tmp_path: Path) -> None:
    from stepscope.measure.session.session import Session
    from stepscope.measure.settings import Settings

    session = Session(Settings(folder=str(tmp_path)))
    session.pace.passing.room = 500
    session.pace.first = 100
    session.wake(140)
    assert session.pace.passing.room == 39  # step 139 is noted, and at its end the window opens
    session.close()


def test_a_hostile_stretch_is_left_out() -> None:
    lines = [
        StepLine(step=0, wall_ns=5),
        StepLine(step=1, wall_ns=5, steps=3, unit=1, walls="H!!"),
        StepLine(step=1, wall_ns=5, steps=1 << 40, unit=1, walls="HAQA="),
        StepLine(step=1, wall_ns=5, steps=1, unit=0, walls="HAQA="),
        StepLine(step=1, wall_ns=5, steps=1, unit=1, walls="ZAQA="),
        StepLine(step=1, wall_ns=5, steps=1, unit=7, walls="HAQA="),
    ]
    rows = dict(zip(STEP_LINE_FIELDS, step_rows(lines), strict=True))
    assert rows["step"].tolist() == [0, 1]
    assert rows["wall_ns"].tolist() == [5, 7]


def test_who_watches_for_stalls_sees_each_step_of_a_stretch() -> None:
    (_, text) = StepLines(0)([ended(2 * MS, 0), stretch(1, 2 * MS, 3 * MS, 8 * MS)], last=True)
    each = steps_of_stretch(json.loads(text))
    assert [(step["step"], step["wall_ns"]) for step in each] == [(1, MS), (2, 5 * MS)]
