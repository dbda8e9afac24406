"""Trainings that really hang, or are only slow."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from plant import (
    HANGS,
    HEALTHY,
    TORCHRUN,
    TWO_HOSTS,
    Plant,
    command,
    end,
    has_namespaces,
    play,
    play_healthy,
    start,
)


@pytest.mark.few(4)
@pytest.mark.parametrize("plant", HANGS, ids=lambda plant: plant.name)
def test_rank_and_line_are_named(tmp_path: Path, plant: Plant) -> None:
    if plant.launcher == TWO_HOSTS and not has_namespaces():
        pytest.skip("needs root and ip (iproute2)")
    outcome = play(plant, tmp_path)
    assert outcome.is_right(plant), (outcome.answer, outcome.errors)
    assert outcome.after_s is not None
    assert outcome.after_s < 60


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", HEALTHY)
def test_nobody_is_accused_of_being_slow(tmp_path: Path, kind: str) -> None:
    if kind == "held" and shutil.which("gdb") is None:
        pytest.skip("needs gdb")
    outcome = play_healthy(kind, tmp_path)
    assert not outcome.answer["is_hang"], outcome.answer
    assert outcome.said is None


def test_nobody_is_accused_any_more_once_a_stopped_rank_goes_on(tmp_path: Path) -> None:
    outcome = play_healthy("paused", tmp_path)
    assert "is stopped (SIGSTOP)" in (outcome.said or "")
    assert not outcome.answer["is_hang"], outcome.answer


def test_a_job_that_hangs_ends_if_asked(tmp_path: Path) -> None:
    words = command("sleeps", 2, TORCHRUN)
    process = start(words, tmp_path, "--on-hang", "end", after_s=3.0)
    try:
        assert process.wait(120) == 7
    finally:
        end(process, tmp_path)


def test_losses_are_equal_to_the_bit_with_and_without_the_watch(tmp_path: Path) -> None:
    losses = []
    for after_s in (0.5, 0.0):  # the first one looks eight times a second
        folder = tmp_path / str(after_s)
        process = start(command("nothing", 2, TORCHRUN), folder, after_s=after_s)
        try:
            assert process.wait(120) == 0
        finally:
            end(process, folder)
        losses.append(sorted(re.findall(r"loss \d+ \d+ \S+", (folder / "out").read_text())))
    assert len(losses[0]) == 120
    assert losses[0] == losses[1]
