"""Every step of a rank as columns: packed parts, steps.jsonl, and what may be wrong with them."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.measure.writer import PartColumns
from stepscope.records import folders
from stepscope.records.folders import (
    ABSENT,
    END,
    EXTRA_FIELDS,
    MARKS,
    OTHER,
    PHASE_FIELDS,
    STEP,
    WALL,
)
from stepscope.records.rank import ALL_PHASES, StepColumns
from stepscope.trace.decode import Oddities
from stepscope.trace.files import is_trace_name
from stepscope.trace.run_folder.step_files import (
    STEP_LINE_FIELDS,
    StepLine,
    clock_jumps,
    read_step_columns,
    step_rows,
)

S = 1_000_000_000
BEGAN = 1_700_000_000 * S


def row(step: int, wall_ns: int = 1000, **more: Any) -> dict[str, Any]:
    return {"step": step, "wall_ns": wall_ns, "window": False, **more}


def on_clock(walls: list[int], began: int = BEGAN) -> list[dict[str, Any]]:
    ends = began + np.cumsum(walls)
    return [
        row(step, wall, end_unix_ns=int(end))
        for step, (wall, end) in enumerate(zip(walls, ends, strict=True))
    ]


def write_tail(folder: Path, *rows: dict[str, Any], cut: str = "") -> None:
    text = "".join(f"{json.dumps(line)}\n" for line in rows)
    (folder / "steps.jsonl").write_text(text + cut)


def write_part(folder: Path, number: int, *rows: dict[str, Any]) -> Path:
    columns = PartColumns()
    columns.add([dict(line) for line in rows])
    file = folder / folders.part_name(number)
    file.write_bytes(gzip.compress(b"".join(columns.encode())))
    return file


def read(folder: Path) -> tuple[StepColumns, Oddities]:
    oddities = Oddities("steps.jsonl")
    steps = read_step_columns(folder, oddities)
    assert steps is not None
    return steps, oddities


def as_lists(steps: StepColumns) -> dict[str, Any]:
    columns = {name: getattr(steps, name) for name in StepColumns.__struct_fields__}
    columns |= columns.pop("phases_ns")
    return {
        name: values.tolist() if isinstance(values, np.ndarray) else values
        for name, values in columns.items()
    }


def said(oddities: Oddities) -> dict[str, str]:
    return {note.id: note.detail for note in oddities.notes}


def test_a_folder_without_steps_has_none(tmp_path: Path) -> None:
    assert read_step_columns(tmp_path, Oddities("steps.jsonl")) is None
    write_tail(tmp_path, cut='{"step": 0, "wall_')
    assert read_step_columns(tmp_path, Oddities("steps.jsonl")) is None
    assert read_step_columns(tmp_path / "nowhere", Oddities("steps.jsonl")) is None


def test_the_fields_of_a_line_become_columns(tmp_path: Path) -> None:
    extras = dict.fromkeys(folders.EXTRA_FIELDS, 7)
    phases = {f"{phase}_ns": 10 + place for place, phase in enumerate(ALL_PHASES)}
    write_tail(tmp_path, row(0, first=True), row(1, 5000, end_unix_ns=9, **extras, **phases))
    steps, oddities = read(tmp_path)
    assert oddities.notes == ()
    assert steps.number.tolist() == [0, 1]
    assert steps.wall_ns.tolist() == [1000, 5000]
    assert steps.end_unix_ns.tolist() == [0, 9]
    assert steps.whole.tolist() == [False, True]
    assert {phase: values.tolist() for phase, values in steps.phases_ns.items()} == {
        phase: [0, 10 + place] for place, phase in enumerate(ALL_PHASES)
    }
    unknown = {"device_ns": -1, "allocated_bytes": -1}
    for name in folders.EXTRA_FIELDS:
        assert getattr(steps, name).tolist() == [unknown.get(name, 0), 7]


def test_what_an_older_capture_lacks_is_not_captured(tmp_path: Path) -> None:
    write_tail(tmp_path, row(0, forward_ns=400, data_ns=0))
    steps, _ = read(tmp_path)
    assert all(getattr(steps, name) is None for name in folders.EXTRA_FIELDS)
    assert list(steps.phases_ns) == ["forward"]


def test_what_was_counted_and_never_happened_is_zero(tmp_path: Path) -> None:
    counters = {"cpu_wait_ns": True, "major_faults": False, "memory": "host"}
    (tmp_path / "rank.json").write_text(json.dumps({"counters": counters}))
    write_tail(tmp_path, row(0), row(1))
    steps, _ = read(tmp_path)
    known = [name for name in folders.EXTRA_FIELDS if getattr(steps, name) is not None]
    assert known == ["epoch_gap_ns", "cpu_wait_ns", "graphs"]
    assert [getattr(steps, name).tolist() for name in known] == [[0, 0]] * 3
    counters["memory"] = "device"
    (tmp_path / "rank.json").write_text(json.dumps({"counters": counters}))
    retries = read(tmp_path)[0].retries
    assert retries is not None
    assert retries.tolist() == [0, 0]


@pytest.mark.parametrize("content", ["", "7", '{"counters": 3}', '{"counters": {"memory": 1}}'])
def test_counters_that_cannot_be_read_count_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "rank.json").write_text(content)
    write_tail(tmp_path, row(0))
    assert read(tmp_path)[0].cpu_wait_ns is None


def test_packed_parts_come_before_the_tail(tmp_path: Path) -> None:
    write_part(tmp_path, 1, row(0, device_ns=5), row(1, gc_ns=3, memory=True))
    write_part(tmp_path, 2, row(2, 77, window=True))
    write_tail(tmp_path, row(3, elements=9))
    steps, oddities = read(tmp_path)
    assert oddities.notes == ()
    assert steps.number.tolist() == [0, 1, 2, 3]
    assert steps.wall_ns.tolist() == [1000, 1000, 77, 1000]
    assert steps.window.tolist() == [False, False, True, False]
    assert steps.memory.tolist() == [False, True, False, False]
    assert steps.device_ns is not None
    assert steps.device_ns.tolist() == [5, -1, -1, -1]
    assert steps.elements is not None
    assert steps.elements.tolist() == [0, 0, 0, 9]
    assert steps.phases_ns["gc"].tolist() == [0, 3, 0, 0]


@pytest.mark.parametrize("name", ["steps-00001.json.gz", "collectives-00001.json.gz"])
def test_a_part_is_no_trace(name: str) -> None:
    assert not is_trace_name(name)


def test_a_kill_between_packing_and_cutting_leaves_copies_that_do_not_count(tmp_path: Path) -> None:
    rows = on_clock([10, 20, 30, 40])
    write_part(tmp_path, 1, *rows[:3])
    write_tail(tmp_path, *rows)
    steps, oddities = read(tmp_path)
    assert steps.wall_ns.tolist() == [10, 20, 30, 40]
    assert oddities.notes == ()


def test_of_two_lines_about_a_step_the_first_counts(tmp_path: Path) -> None:
    write_tail(tmp_path, row(3), row(1), row(2, 5), row(2, 9))
    steps, oddities = read(tmp_path)
    assert steps.number.tolist() == [1, 2, 3]
    assert steps.wall_ns.tolist() == [1000, 5, 1000]
    assert oddities.count == 2
    assert "step 2: it is there twice" in said(oddities)["side-file-values"]
    write_tail(tmp_path, row(3), row(1))
    assert "step 1: it comes after step 3" in said(read(tmp_path)[1])["side-file-values"]


def test_phases_longer_than_their_step_are_not_captured(tmp_path: Path) -> None:
    write_tail(tmp_path, row(0, 100, forward_ns=60, gc_ns=41), row(1, 100, data_ns=100))
    steps, oddities = read(tmp_path)
    assert {phase: values.tolist() for phase, values in steps.phases_ns.items()} == {
        "data": [0, 100]
    }
    assert "step 0: its phases are longer than the step" in said(oddities)["side-file-values"]


def test_a_damaged_line_costs_that_line(tmp_path: Path) -> None:
    write_tail(tmp_path, row(0), row(1, -4), row(1), row(2, device_ns=-4), cut='{"step": 3, "wa')
    steps, oddities = read(tmp_path)
    assert steps.number.tolist() == [0, 1, 2]
    assert oddities.count == 2
    assert "line 2" in said(oddities)["side-file-values"]


def test_a_null_counts_as_absent(tmp_path: Path) -> None:
    write_tail(tmp_path, row(0, device_ns=None), row(1, device_ns=4))
    steps, oddities = read(tmp_path)
    assert steps.device_ns is not None
    assert steps.device_ns.tolist() == [-1, 4]
    assert oddities.notes == ()


def test_gaps_in_the_numbers_are_reported(tmp_path: Path) -> None:
    write_tail(tmp_path, row(0), row(1), row(5), row(9))
    _, oddities = read(tmp_path)
    assert said(oddities)["missing-steps"] == (
        "steps.jsonl: 6 steps of 10 are missing, the first gap follows step 1"
    )


def test_a_clock_that_was_set_is_reported(tmp_path: Path) -> None:
    rows = on_clock([S] * 6)
    for late in rows[3:]:
        late["end_unix_ns"] -= 3600 * S
    write_tail(tmp_path, *rows)
    steps, oddities = read(tmp_path)
    assert said(oddities)["clock-set"] == (
        "steps.jsonl: the wall clock was set 3,600 s back at step 3"
    )
    assert clock_jumps(steps).tolist() == [0, 0, 0, -3600 * S, 0, 0]


def test_a_clock_that_is_only_corrected_was_not_set(tmp_path: Path) -> None:
    rows = on_clock([S] * 6)
    for place, line in enumerate(rows):
        line["end_unix_ns"] += place * 500_000  # 500 parts in a million
    write_tail(tmp_path, *rows)
    assert read(tmp_path)[1].notes == ()


def test_time_that_capture_spends_between_steps_is_no_set_clock(tmp_path: Path) -> None:
    rows = on_clock([S] * 4)
    rows[2]["window"] = True
    for late in rows[2:]:
        late["end_unix_ns"] += 5 * S  # the profiler started
    write_tail(tmp_path, *rows)
    assert read(tmp_path)[1].notes == ()


def test_a_damaged_part_is_named_and_the_others_count(tmp_path: Path) -> None:
    write_part(tmp_path, 1, row(0), row(1))
    damaged = write_part(tmp_path, 2, row(2), row(3))
    write_part(tmp_path, 4, row(6))
    write_tail(tmp_path, row(7))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    steps, oddities = read(tmp_path)
    assert steps.number.tolist() == [0, 1, 6, 7]
    details = [note.detail for note in oddities.notes]
    assert details == [
        "steps-00002.json.gz could not be read, its steps are missing: it ends early",
        "steps-00003.json.gz could not be read, its steps are missing: it is missing",
        "steps.jsonl: 4 steps of 8 are missing, after step 1",
    ]


def good_part() -> dict[str, Any]:
    return {
        "schema": 1,
        "steps": 2,
        "base": {"wall_ns": 5},
        "columns": {"step": [0, 1], "wall_ns": [1, 2]},
        "marks": {"window": [1]},
    }


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"steps": 3},
        {"steps": 0},
        {"columns": {"step": [0, 1]}},
        {"columns": {"step": [0, 1], "wall_ns": [1]}},
        {"columns": {"step": [0, 1], "wall_ns": [1, 2**70]}},
        {"columns": {"step": [0, 1], "wall_ns": [1, -40]}},
        {"columns": {"step": [0, 1], "wall_ns": [1, "x"]}},
        {"columns": {"step": [-4, 1], "wall_ns": [1, 2]}},
        {"marks": {"window": [2]}},
        {"base": 7},
    ],
)
def test_a_part_that_cannot_be_is_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / folders.part_name(1)
    write_tail(tmp_path, row(2))
    file.write_bytes(gzip.compress(json.dumps(good_part()).encode()))
    assert read(tmp_path)[0].number.tolist() == [0, 1, 2]
    file.write_bytes(gzip.compress(json.dumps(good_part() | change).encode()))
    steps, oddities = read(tmp_path)
    assert steps.number.tolist() == [2]
    assert [note.id for note in oddities.notes] == ["side-file-unreadable"]


@pytest.mark.parametrize("content", [b"", b"no gzip", gzip.compress(b"[" * 100_000)])
def test_a_part_that_is_none_is_left_out(tmp_path: Path, content: bytes) -> None:
    (tmp_path / folders.part_name(1)).write_bytes(content)
    write_tail(tmp_path, row(2))
    assert [note.id for note in read(tmp_path)[1].notes] == ["side-file-unreadable"]


def test_steps_that_move_while_they_are_read_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = on_clock([10, 20, 30, 40])
    write_tail(tmp_path, *rows)

    def move_then_list(folder: Path) -> list[Path]:
        write_part(tmp_path, 1, *rows[:3])
        write_tail(tmp_path, rows[3])
        return sorted(folder.iterdir())

    monkeypatch.setattr("stepscope.trace.run_folder.step_files.list_folder", move_then_list)
    steps, oddities = read(tmp_path)
    assert steps.wall_ns.tolist() == [10, 20, 30, 40]
    assert oddities.notes == ()


@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=5), st.booleans())
def test_damage_anywhere_is_reported_or_harmless(place: int, junk: bytes, packed: bool) -> None:
    rows = on_clock([1000 + step for step in range(40)])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        part = write_part(folder, 1, *rows[:30])
        write_tail(folder, *rows[30:])
        file = part if packed else folder / "steps.jsonl"
        content = bytearray(file.read_bytes())
        place %= len(content)
        content[place : place + len(junk)] = junk
        file.write_bytes(content)
        steps, oddities = read(folder)
    numbers = set(steps.number.tolist())
    assert numbers >= set(range(30, 40) if packed else range(30))
    assert numbers >= set(range(39)) or oddities.notes  # a last line may be half written


def test_every_phase_has_a_field_in_packed_parts() -> None:
    fields = {*folders.PHASE_FIELDS, folders.OTHER}
    assert fields == {f"{phase}_ns" for phase in (*ALL_PHASES, "unnoted")}


ROWS = st.lists(
    st.fixed_dictionaries(
        {"wall_ns": st.integers(10**6, 10**12)},
        optional={
            **{f"{phase}_ns": st.integers(0, 10**5) for phase in ALL_PHASES},
            **{name: st.integers(1, 10**12) for name in folders.EXTRA_FIELDS},
            **dict.fromkeys(folders.MARKS, st.just(True)),
            "end_unix_ns": st.integers(1, 2 * BEGAN),
        },
    ),
    min_size=1,
    max_size=12,
)


@given(ROWS, st.data())
def test_steps_are_the_same_packed_or_not(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    rows = [{"step": step, **line} for step, line in enumerate(rows)]
    cut = data.draw(st.integers(0, len(rows)))
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        write_tail(Path(one), *rows)
        write_tail(Path(two), *rows[cut:])
        if cut:
            write_part(Path(two), 1, *rows[:cut])
        plain, packed = as_lists(read(Path(one))[0]), as_lists(read(Path(two))[0])
    digits = min(line["wall_ns"] for line in rows[: cut or 1]) / folders.ROUNDING
    assert totals(plain) == totals(packed)
    for name in plain.keys() | packed.keys():
        rounded = name == "other" or {name, f"{name}_ns"} & folders.ROUNDED
        nothing = [0] * len(rows)
        values = [columns.get(name, nothing) for columns in (plain, packed)]
        if not rounded or values[0] is None:
            assert values[0] == values[1]
        else:
            apart = np.abs(np.subtract(*values))
            assert (apart <= digits * (4 if name == "other" else 1)).all()


def totals(columns: dict[str, Any]) -> list[int]:
    phases = [columns[phase] for phase in ALL_PHASES if phase in columns]
    return np.sum(phases, axis=0).tolist() if phases else []


def test_steps_that_a_closed_rank_counted_and_the_file_lacks_are_reported(tmp_path: Path) -> None:
    write_tail(tmp_path, *(row(number) for number in range(4)))
    (tmp_path / "rank.json").write_text('{"status": "finished", "steps": 6}')
    assert "the last 2 steps of 6 are missing" in said(read(tmp_path)[1])["missing-steps"]
    (tmp_path / "rank.json").write_text('{"status": "running", "steps": 6}')
    assert "missing-steps" not in said(read(tmp_path)[1])


# Lines of steps.jsonl have the fields of packed parts, whoever reads them.


def test_a_line_has_the_fields_of_a_packed_part() -> None:
    packed = (STEP, WALL, END, *PHASE_FIELDS, OTHER, *EXTRA_FIELDS, *MARKS)
    assert packed == STEP_LINE_FIELDS


def test_lines_become_rows_of_fields() -> None:
    text = b'{"step": 3, "wall_ns": 9, "device_ns": null, "window": true}'
    rows = step_rows([msgspec.json.decode(text, type=StepLine), StepLine(step=4, wall_ns=8)])
    fields = dict(zip(STEP_LINE_FIELDS, rows.tolist(), strict=True))
    assert (fields["step"], fields["wall_ns"]) == ([3, 4], [9, 8])
    assert fields["device_ns"] == fields["elements"] == [ABSENT, ABSENT]
    assert fields["window"] == [1, 0]
