"""Which files of a rank count as captured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.measure.folder import captured_parts

if TYPE_CHECKING:
    from pathlib import Path


def test_packed_steps_and_further_windows_are_listed(tmp_path: Path) -> None:
    names = (
        "trace-step-500.json.gz", "trace-stall.json.gz", "trace.json.gz", "steps-00002.json.gz",
        "steps-00001.json.gz", "steps.jsonl", "collectives-00001.json.gz", "samples.json",
    )  # fmt: skip
    for name in (*names, "rank.json", ".trace.json.gz@host.7.tmp", "notes.txt"):
        (tmp_path / name).touch()
    assert captured_parts(tmp_path) == [
        "trace.json.gz", "steps.jsonl", "samples.json", "collectives-00001.json.gz",
        "steps-00001.json.gz", "steps-00002.json.gz", "trace-stall.json.gz",
        "trace-step-500.json.gz",
    ]  # fmt: skip


def test_a_folder_that_was_removed_has_none(tmp_path: Path) -> None:
    assert captured_parts(tmp_path / "gone") == []
