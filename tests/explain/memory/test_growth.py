"""A leak is growth in every step, by about as much, after the first steps."""

from __future__ import annotations

import json

import pytest

from stepscope.explain.memory.lifetimes import growth_of, growth_of_steps
from stepscope.trace.read import read_rank_inputs

from ..build import write
from . import training

MB = 10**6


def test_steady_growth_is_a_leak():
    growth = growth_of("trace", [100 * MB + n * MB for n in range(5)])
    assert growth is not None
    assert growth.steady
    assert growth.bytes_per_step == MB


@pytest.mark.parametrize(
    ("why", "ends"),
    [
        ("nothing grows", [5, 5, 5, 5, 5]),
        ("it goes up and down", [5, 9, 5, 9, 5, 9]),
        ("one step only", [5, 5, 5, 900, 900]),
        ("too few to tell", [5, 6, 7]),
        ("it slows down", [0, 1000, 1500, 1600, 1610]),
    ],
)
def test_other_growth_is_not(why, ends):
    growth = growth_of("trace", ends)
    assert growth is not None
    assert not growth.steady


def test_one_end_says_nothing():
    assert growth_of("trace", [5]) is None


def test_the_first_steps_of_a_run_are_left_out(explained):
    rank = explained(*training.train(7, first=0, leak=50_000))
    assert rank.memory is not None
    growth = rank.memory.growth
    assert growth is not None
    assert (growth.skipped, len(growth.ends_bytes)) == (3, 4)
    assert growth.steady
    assert growth.bytes_per_step == 50_000


def test_a_training_that_returns_everything_does_not_grow(explained):
    growth = explained(*training.train(6)).memory.growth
    assert growth is not None
    assert growth.bytes_per_step == 0
    assert not growth.steady


def test_of_a_long_run_the_first_and_last_steps_are_kept(tmp_path):
    rows = [{"step": n, "wall_ns": 1, "allocated_bytes": 1000 + 100 * n} for n in range(10_000)]
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    memory = read_rank_inputs(write(tmp_path / "trace.json", *training.train(1))).memory
    assert len(memory.step_bytes) < 5_000
    assert (memory.step_bytes[0][0], memory.step_bytes[-1][0]) == (0, 9_999)
    growth = growth_of_steps(memory.step_bytes)
    everything = growth_of_steps([(row["step"], row["allocated_bytes"]) for row in rows])
    assert growth == everything


def test_steps_that_were_written_with_their_bytes_are_read(tmp_path):
    rows = [{"step": n, "wall_ns": 1, "allocated_bytes": 1000 + 100 * n} for n in range(10)]
    rows[4].pop("allocated_bytes")
    text = "\n".join(map(json.dumps, rows)) + '\n{"step": 10, "alloc'
    (tmp_path / "steps.jsonl").write_text(text)
    memory = read_rank_inputs(write(tmp_path / "trace.json", *training.train(1))).memory
    assert memory.step_bytes[:2] == ((0, 1000), (1, 1100))
    growth = growth_of_steps(memory.step_bytes)
    assert growth is not None
    assert growth.source == "steps"
    assert growth.skipped == 3
    assert growth.bytes_per_step == 100


def test_only_steps_that_were_read_one_after_the_other_count():
    """Memory is read when that costs little: every third step here, then every one."""
    seldom = [(step, step * MB) for step in range(3, 27, 3)]
    assert growth_of_steps(seldom) is None
    growth = growth_of_steps([*seldom, (30, 30 * MB), (31, 31 * MB), (32, 32 * MB)])
    assert growth is not None
    assert growth.bytes_per_step == MB
    assert len(growth.ends_bytes) == 3


def test_of_a_long_run_the_last_steps_count():
    growth = growth_of_steps([(step, step * MB) for step in range(10_000)])
    assert growth is not None
    assert (growth.steady, len(growth.ends_bytes)) == (True, 64)
