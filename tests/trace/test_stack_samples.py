"""samples.json, whole and damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.records.source_lines import Place
from stepscope.trace.run_folder.rank_folder import SAMPLES, read_stack_samples

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
