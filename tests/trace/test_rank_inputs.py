"""A rank's inputs: what lies next to its trace is read once, and what is missing is left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.records.hardware import Profile
from stepscope.records.rank import MemoryInputs
from stepscope.records.source_lines import Place
from stepscope.trace.machine_profiles import save_profile
from stepscope.trace.read import ReadOptions, read_rank_inputs
from stepscope.trace.run_folder.rank_folder import SAMPLES, read_rank_folder, read_stack_samples

GOLDEN = Path(__file__).parent.parent / "golden/h200-resnet18/rank-00000"
OPTIONS = ReadOptions(cache=False, memory_limit=7)


def profile(device: str, when: float, kind: str = "cuda", host: str = "there") -> Profile:
    return Profile(
        host=host, device=device, kind=kind, torch="2", when_unix=when, world_size=1, backend=None,
        threads=1, matmul_flops={},
    )  # fmt: skip


def test_a_bare_trace_has_nothing_but_the_users_limit(tmp_path: Path) -> None:
    path = shutil.copy(GOLDEN / "trace.json.gz", tmp_path)
    inputs = read_rank_inputs(path, OPTIONS)
    assert (inputs.measured, inputs.folder, inputs.calibrations) == (None, None, ())
    assert (inputs.profile, inputs.host_load) == (None, None)
    assert inputs.memory == MemoryInputs(limit_bytes=7)


def test_a_run_folder_has_steps_folder_and_memory(tmp_path: Path) -> None:
    inputs = read_rank_inputs(GOLDEN / "trace.json.gz", OPTIONS, name="what the user says")
    assert inputs.trace.path == "what the user says"
    assert inputs.steps is not None
    assert inputs.folder is not None
    assert inputs.memory.captured is not None
    assert inputs.memory.limit_bytes == 7


def test_calibrations_are_those_of_the_ranks_host_and_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile is the newest one of the rank's device."""
    monkeypatch.setenv("STEPSCOPE_PROFILES", str(tmp_path / "profiles"))
    folder = tmp_path / "rank-00000"
    shutil.copytree(GOLDEN, folder)
    facts = json.loads((folder / "rank.json").read_text()) | {"host": "there"}
    (folder / "rank.json").write_text(json.dumps(facts))
    device = read_rank_inputs(folder / "trace.json.gz", OPTIONS).trace.device_name
    assert device is not None
    saved = [
        profile(device, 1.0),
        msgspec.structs.replace(profile(device, 2.0), world_size=2),
        profile("another", 3.0),
        profile("CPU", 4.0, kind="cpu"),
        profile(device, 5.0, host="elsewhere"),
    ]
    for each in saved:
        save_profile(each)
    inputs = read_rank_inputs(folder / "trace.json.gz", OPTIONS)
    assert inputs.calibrations == (saved[2], saved[1], saved[0])
    assert inputs.profile == saved[1]


# rank.json's host_load: read where it is whole, left out with a word where it is not.

LOAD = {
    "threads": 4,
    "cores": 8,
    "quota_cores": 2.5,
    "local_ranks": 2,
    "a_field_of_tomorrow": 1,
    "plain": {"steps": 5, "wall_ns": 1000, "user_ns": 1500, "system_ns": 500, "busy_ns": 6000,
              "job_ns": 2000, "stolen_ns": 1000, "training_waiting_ns": 250,
              "others": [{"name": "make", "cores": 3.0}]},
}  # fmt: skip


def folder_of(tmp_path: Path, **facts: Any) -> Any:
    (tmp_path / "rank.json").write_text(json.dumps({"host": "here", **facts}))
    found = read_rank_folder(tmp_path / "trace.json.gz")
    assert found is not None
    return found


def test_cores_and_shares_are_over_the_steps_wall_time(tmp_path: Path) -> None:
    load = folder_of(tmp_path, host_load=LOAD).load
    assert (load.room, load.job_threads) == (2.5, 8)
    plain = load.plain
    assert plain.used_cores == pytest.approx(2.0)
    assert plain.other_cores == pytest.approx(4.0)
    assert plain.stolen_cores == pytest.approx(1.0)
    assert plain.waiting_share == pytest.approx(0.25)
    assert plain.others[0].name == "make"


def test_values_that_the_system_does_not_report_are_none(tmp_path: Path) -> None:
    load = folder_of(tmp_path, host_load={"threads": 1, "plain": {"steps": 1, "wall_ns": 9}}).load
    assert load.room is None
    assert (load.plain.used_cores, load.plain.other_cores, load.plain.waiting_share) == (None,) * 3


@pytest.mark.parametrize("told", [None, {}])
def test_an_older_run_has_no_load(tmp_path: Path, told: dict[str, Any] | None) -> None:
    assert folder_of(tmp_path, host_load=told).load is None
    assert folder_of(tmp_path).load is None


def test_a_damaged_host_load_leaves_the_other_facts(tmp_path: Path) -> None:
    found = folder_of(tmp_path, host_load={"threads": "many"})
    assert found.load is None
    assert found.host == "here"
    (note,) = found.notes
    assert note.id == "side-file-values"
    assert "host_load.threads: 'many'" in note.detail


# samples.json, whole and damaged.

FILE: dict[str, Any] = {
    "schema": 1, "samples": 3, "not_kept": 0, "watched_s": 1.0, "cost_s": 0.0,
    "stacks": [
        {"count": 2, "frames": [["train.py", 3, "main"], ["model.py", 9, "forward"]]},
        {"count": 1, "frames": [["train.py", 4, "main"]]},
    ],
    "steps": {"every": 1, "number": [1, 1, 2], "stack": [0, 1, 0]},
}  # fmt: skip


def write(folder: Path, content: Any) -> Path:
    (folder / SAMPLES).write_text(json.dumps(content))
    return folder


def test_every_sample_has_its_step_and_its_stack(tmp_path: Path) -> None:
    samples, notes = read_stack_samples(write(tmp_path, FILE))
    assert samples is not None
    assert samples.stacks[1] == (Place(file="train.py", line=4, function="main"),)
    assert samples.number.tolist() == [1, 1, 2]
    assert samples.stack.tolist() == [0, 1, 0]
    assert notes == ()


def test_older_captures_do_not_know_the_steps(tmp_path: Path) -> None:
    old = {key: value for key, value in FILE.items() if key != "steps"}
    assert read_stack_samples(write(tmp_path, old)) == (None, ())
    assert read_stack_samples(tmp_path / "nowhere") == (None, ())


@pytest.mark.parametrize(
    "steps",
    [
        {"number": [1, 1], "stack": [0]},
        {"number": [1], "stack": [2]},
        {"number": [1, -5], "stack": [0, 0]},
        {"number": [1, "x"], "stack": [0, 0]},
    ],
)
def test_samples_that_do_not_fit_their_stacks_are_left_out_with_a_note(
    tmp_path: Path, steps: dict[str, Any]
) -> None:
    samples, notes = read_stack_samples(write(tmp_path, {**FILE, "steps": steps}))
    assert samples is None
    assert notes


def test_a_file_that_was_cut_short_is_a_note(tmp_path: Path) -> None:
    text = json.dumps(FILE)
    (tmp_path / SAMPLES).write_text(text[: len(text) // 2])
    samples, notes = read_stack_samples(tmp_path)
    assert samples is None
    assert [note.id for note in notes] == ["side-file-unreadable"]
