"""A rank's inputs: what lies next to its trace is read once, and what is missing is left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from stepscope.records.hardware import Profile
from stepscope.records.rank import MemoryInputs
from stepscope.trace.machine_profiles import save_profile
from stepscope.trace.read import ReadOptions, read_rank_inputs

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
