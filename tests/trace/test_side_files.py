"""Side files of a run folder: what makes no sense is counted, and costs nothing else."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import stepscope
from measured import read_measured_steps
from stepscope.records.explanation import RankExplanation
from stepscope.step.timeline import mean_budget
from stepscope.trace.decode import Oddities
from stepscope.trace.run_folder.rank_facts import read_facts
from stepscope.trace.run_folder.rank_folder import read_captured, read_rank_folder
from stepscope.trace.run_folder.step_files import read_step_columns

SIDE = ("rank.json", "steps.jsonl", "memory.json", "clock.json", "comms.jsonl")
NOTES = {"side-file-unreadable", "side-file-values", "memory-unreadable"}


@pytest.fixture
def run(tmp_path: Path, golden: Path) -> Path:
    shutil.copytree(golden / "cpu-two-ranks", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def rank(run: Path) -> Path:
    return run / "rank-00000"


def first(run: Path) -> RankExplanation:
    return stepscope.explain_job(run, cache=False).ranks[0]


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_sound_run_folder_has_nothing_to_say(run: Path) -> None:
    assert {note.id: note.detail for note in first(run).quality if note.id in NOTES} == {}


@pytest.mark.parametrize("name", SIDE)
@pytest.mark.parametrize("what", ["pipe", "zeros", "folder", "dangling", "kmsg"])
def test_a_path_that_is_not_a_file_is_not_captured_and_never_waits(
    rank: Path, name: str, what: str
) -> None:
    file = rank / name
    file.unlink()
    {
        "pipe": lambda: os.mkfifo(file),
        "zeros": lambda: file.symlink_to("/dev/zero"),
        "folder": file.mkdir,
        "dangling": lambda: file.symlink_to("nowhere"),
        "kmsg": lambda: file.symlink_to("/proc/kmsg"),
    }[what]()
    trace = rank / "trace.json.gz"
    began = time.monotonic()
    folder = read_rank_folder(trace)
    captured, about_memory = read_captured(rank)
    odd = Oddities("steps.jsonl")
    steps = read_step_columns(rank, odd)
    assert time.monotonic() - began < 2
    assert folder is not None
    said = {note.detail for note in (*folder.notes, *about_memory, *odd.notes)}
    missing = what == "dangling"  # says what a file that is not there says: nothing
    assert (name in " ".join(said)) is not missing
    assert (captured is None) is (name == "memory.json")
    assert (steps is None) is (name == "steps.jsonl")
    assert (folder.rounds == ()) is (name == "clock.json")
    assert (folder.comms == ()) is (name == "comms.jsonl")
    assert (folder.host is None) is (name == "rank.json")


DAMAGE = {
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "not text": b'{"host": "\xff\xfe", "step": 3}',
    "empty": b"",
    "digits": b'{"steps": ' + b"9" * 5000 + b"}",
    "nan": b'{"steps": NaN, "wall_ns": Infinity}',
    "list": b"[1, 2]",
    "number": b"12",
    "null": b"null",
    "zeros": b"\0" * 300,
}


@pytest.mark.few(20)
@pytest.mark.parametrize("name", SIDE)
@pytest.mark.parametrize("how", DAMAGE)
def test_damage_of_any_kind_is_reported_and_the_rest_is_explained(
    run: Path, rank: Path, name: str, how: str
) -> None:
    (rank / name).write_bytes(DAMAGE[how])
    assert first(run).budget.step_ms > 0


@pytest.mark.parametrize("name", ["rank.json", "memory.json"])
def test_a_file_cut_at_any_byte_is_read_or_reported(rank: Path, name: str) -> None:
    whole = (rank / name).read_bytes()
    for end in range(0, len(whole), 17):
        (rank / name).write_bytes(whole[:end])
        folder = read_rank_folder(rank / "trace.json.gz")
        _, about_memory = read_captured(rank)
        assert folder is not None
        assert [*folder.notes, *about_memory]


def test_lines_cut_at_any_byte_lose_the_last_one_only(rank: Path) -> None:
    whole = (rank / "steps.jsonl").read_bytes()
    for end in range(0, len(whole), 31):
        (rank / "steps.jsonl").write_bytes(whole[:end])
        odd = Oddities("steps.jsonl")
        steps = read_step_columns(rank, odd)
        count = 0 if steps is None else len(steps)
        assert whole[:end].count(b"\n") <= count <= whole[:end].count(b"\n") + 1
        assert {note.id for note in odd.notes} <= {"missing-steps"}  # rank.json knows how many


def test_a_byte_order_mark_and_windows_line_ends_are_fine(rank: Path) -> None:
    before = read_measured_steps(rank / "trace.json.gz")
    facts = read_facts(rank)
    for name in SIDE:
        text = (rank / name).read_bytes().replace(b"\n", b"\r\n")
        (rank / name).write_bytes(b"\xef\xbb\xbf" + text)
    assert read_facts(rank) == facts
    assert read_measured_steps(rank / "trace.json.gz") == before


# Values.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", -5), ("steps", True), ("steps", "many"), ("steps", 2**63), ("steps", 1e300),
        ("world_size", 10**12), ("world_size", 0), ("world_size", [2]), ("pid", -1),
        ("host", 7), ("host", ["vm"]), ("argv", "train.py"), ("device", 3),
        ("communication", []), ("host_load", "none"), ("rank", -1), ("rank", 1),
    ],
)  # fmt: skip
def test_one_odd_value_of_rank_json_loses_only_itself(rank: Path, field: str, value: Any) -> None:
    before = read_facts(rank)
    change(rank / "rank.json", **{field: value})
    folder = read_rank_folder(rank / "trace.json.gz")
    assert folder is not None
    (note,) = folder.notes
    assert (note.id, note.count) == ("side-file-values", 1)
    assert field in note.detail
    after = read_facts(rank)
    assert {name for name in before if before[name] != after.get(name)} <= {field}


def test_a_rank_that_contradicts_its_folder_is_reported_and_the_folder_wins(rank: Path) -> None:
    change(rank / "rank.json", rank=5)
    folder = read_rank_folder(rank / "trace.json.gz")
    assert folder is not None
    assert "5 in the folder rank-00000" in folder.notes[0].detail
    assert read_facts(rank)["rank"] == 0


def test_groups_keep_the_ranks_that_can_be(rank: Path) -> None:
    groups = [{"name": "0", "size": 2, "ranks": [0, -1, 1, "x", 2**40]}, 7, {"size": -2}]
    change(rank / "rank.json", communication={"groups": groups})
    folder = read_rank_folder(rank / "trace.json.gz")
    assert folder is not None
    kept = folder.layout["groups"]
    assert [(group["size"], group["ranks"]) for group in kept] == [(2, [0, 1]), (None, [])]
    assert folder.notes[0].count == 5
    assert "communication.groups[0].ranks[1]: -1" in folder.notes[0].detail


def row(step: int, wall_ns: Any = 1_000_000, **more: Any) -> bytes:
    return json.dumps({"step": step, "wall_ns": wall_ns, **more}).encode()


def steps_of(file: Path, *lines: bytes) -> tuple[list[int], Oddities]:
    file.write_bytes(b"\n".join(lines) + b"\n")
    odd = Oddities(file.name)
    steps = read_step_columns(file.parent, odd)
    return [] if steps is None else steps.number.tolist(), odd


@pytest.mark.parametrize(
    "odd",
    [
        row(-1), row(2**63), row(4, -5), row(4, 0), row(4, 10**19), row(4, "8"), row(4, True),
        row(4, None), b"[1]", b"5", b'"x"', b"{}", b"nonsense", b"{" * 9000, b'{"step": "\xff"}',
        b'{"step": 4, "wall_ns": NaN}', b'{"step": 4, "wall_ns": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_a_step_that_cannot_be_is_left_out_and_counted(tmp_path: Path, odd: bytes) -> None:
    steps, found = steps_of(tmp_path / "steps.jsonl", row(1), odd, row(2))
    assert steps == [1, 2]
    (note,) = found.notes
    assert (note.id, note.count) == ("side-file-values", 1)
    assert "line 2" in note.detail


def test_steps_count_once_and_in_their_order(tmp_path: Path) -> None:
    steps, odd = steps_of(tmp_path / "steps.jsonl", row(3), row(1), row(2), row(2, 9))
    assert steps == [1, 2, 3]
    assert odd.count == 2  # step 1 comes late, step 2 comes twice


def test_phases_longer_than_their_step_are_not_captured(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_bytes(row(1, 100, forward_ns=60, backward_ns=41) + b"\n" + row(2, 100, data_ns=100))
    odd = Oddities(file.name)
    steps = read_step_columns(tmp_path, odd)
    assert steps is not None
    assert {name: values.tolist() for name, values in steps.phases_ns.items()} == {"data": [0, 100]}
    assert odd.count == 1


def test_an_odd_device_time_leaves_the_wall_time(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_bytes(row(1, 500, device_ns=-3) + b"\n")
    steps = read_step_columns(tmp_path, Oddities("steps.jsonl"))
    assert steps is not None
    assert (steps.wall_ns.tolist(), steps.device_ns) == ([500], None)


def test_an_endless_list_of_steps_is_read_in_part_and_reported(rank: Path) -> None:
    with (rank / "steps.jsonl").open("ab") as file:
        file.truncate(1 << 30)
    odd = Oddities("steps.jsonl")
    steps = read_step_columns(rank, odd)
    assert steps is not None
    assert len(steps) == 30
    assert [note.id for note in odd.notes] == ["side-file-cut", "side-file-cut"]


@pytest.mark.parametrize(
    ("rounds", "kept"),
    [([[5, 9]], 1), ([[9, 5]], 0), ([[-1, 5]], 0), ([[1]], 0), ([], 0), ([[2**63, 2**64]], 0)],
)
def test_clock_rounds_that_cannot_be_are_left_out(rank: Path, rounds: Any, kept: int) -> None:
    (rank / "clock.json").write_text(json.dumps({"syncs": [{"label": "start", "rounds": rounds}]}))
    folder = read_rank_folder(rank / "trace.json.gz")
    assert folder is not None
    assert len(folder.rounds) == kept
    assert bool(folder.notes) is (kept == 0 and rounds != [])


def test_lines_of_the_flight_recorder_keep_what_can_be(rank: Path) -> None:
    lines = [{"size_bytes": -1, "sequence": 4, "group": 5}, {"size_bytes": 2**70, "created_ns": 7}]
    (rank / "comms.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    folder = read_rank_folder(rank / "trace.json.gz")
    assert folder is not None
    assert [(line["size_bytes"], line["sequence"]) for line in folder.comms] == [
        (None, 4),
        (None, None),
    ]
    assert folder.notes[0].count == 3


# Memory.


def memory_of(rank: Path, **peak: Any) -> tuple[Any, tuple[Any, ...]]:
    content = json.loads((rank / "memory.json").read_text())
    content["peak"] |= peak
    (rank / "memory.json").write_text(json.dumps(content))
    return read_captured(rank)


def test_bytes_that_cannot_be_are_not_captured(rank: Path) -> None:
    captured, notes = memory_of(rank, allocated_bytes=-4, reserved_bytes=2**80)
    assert (captured.peak.allocated_bytes, captured.peak.reserved_bytes) == (None, None)
    assert notes[0].count == 2


def test_categories_that_do_not_add_up_to_the_peak_are_not_captured(rank: Path) -> None:
    seven = dict.fromkeys(
        ("parameters", "gradients", "optimizer", "activations", "buffers", "temporaries", "other"),
        10,
    )
    captured, notes = memory_of(rank, allocated_bytes=70, categories=seven)
    assert (captured.peak.categories, notes) == (seven, ())
    captured, notes = memory_of(rank, allocated_bytes=71, categories=seven)
    assert captured.peak.categories == {}
    assert "they sum to 70 bytes of 71 allocated" in notes[0].detail


def test_an_unknown_category_is_left_out(rank: Path) -> None:
    captured, notes = memory_of(rank, categories={"parameters": 5, "magic": 7, "other": "x"})
    assert captured.peak.categories == {"parameters": 5}
    assert notes[0].count == 2


def test_shares_of_memory_stay_within_one(golden: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rank-00000"
    shutil.copytree(golden / "h200-resnet18/rank-00000", folder)
    content = json.loads((folder / "memory.json").read_text())
    content["peak"] |= {"allocated_bytes": 2**49, "reserved_bytes": 2**50, "categories": {}}
    (folder / "memory.json").write_text(json.dumps(content))
    findings = {each.id: each.share for each in first(tmp_path).findings}
    assert findings["memory-near-limit"] == 1.0
    assert 0 <= findings["fragmentation"] <= 1


# Several ranks.


def test_shares_of_the_job_add_up_if_a_rank_has_steps_and_no_work(run: Path) -> None:
    ranks = stepscope.explain_job(run, cache=False).ranks
    parts = tuple(replace(part, ms=0.0, share=0.0) for part in ranks[1].budget.parts)
    idle = replace(ranks[1], budget=replace(ranks[1].budget, parts=parts))
    budget = mean_budget((ranks[0], idle))
    assert sum(part.share for part in budget.parts) == pytest.approx(1)
    assert budget.step_ms == ranks[0].budget.step_ms


def test_names_that_are_no_text_are_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from stepscope.ui.json_text import json_text
    from stepscope.ui.terminal.explanation import print_explanation
    from stepscope.ui.topics.explanation_json import explanation_json

    moved = run.rename(run.with_name(os.fsdecode(b"r\xff\xfe")))
    explanation = stepscope.explain_job(moved, cache=False)
    assert json_text(explanation_json(explanation)).encode()
    print_explanation(explanation)
    capsys.readouterr().out.encode()
