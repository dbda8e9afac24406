"""Following steps.jsonl: every step once, whatever the job does to the file, in bounded memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from live_runs import append_steps, as_text, make_rows, replace_steps, write_part, write_steps
from stepscope.trace.run_folder.follow_run import RECENT, StepFollower


def test_a_second_look_adds_what_was_written_since(tmp_path: Path) -> None:
    rows = make_rows([10.0] * 5)
    write_steps(tmp_path, rows[:3])
    follower = StepFollower(tmp_path)
    assert follower.read().kept.number.tolist() == [0, 1, 2]
    append_steps(tmp_path, as_text(rows[3:]))
    steps = follower.read()
    assert steps.kept.number.tolist() == [0, 1, 2, 3, 4]
    assert (steps.seen, steps.wall_ns) == (5, 50_000_000)


def test_nothing_is_there_before_the_first_step(tmp_path: Path) -> None:
    steps = StepFollower(tmp_path).read()
    assert (steps.seen, len(steps.kept), steps.unread) == (0, 0, 0)


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    rows = make_rows([10.0, 20.0])
    text = as_text(rows)
    follower = StepFollower(tmp_path)
    (tmp_path / "steps.jsonl").write_text(text[:-30])
    assert follower.read().seen == 1
    append_steps(tmp_path, text[-30:])
    steps = follower.read()
    assert steps.kept.wall_ns.tolist() == [10_000_000, 20_000_000]
    assert steps.unread == 0


def test_lines_that_make_no_sense_are_counted_and_left_out(tmp_path: Path) -> None:
    rows = make_rows([10.0, 20.0])
    write_steps(tmp_path, rows[:1])
    append_steps(tmp_path, '{"step": -4}\nnot JSON\n\n' + as_text(rows[1:]))
    steps = StepFollower(tmp_path).read()
    assert (steps.seen, steps.unread) == (2, 2)


def test_what_a_line_says_is_not_known_stays_unknown(tmp_path: Path) -> None:
    append_steps(tmp_path, '{"step": 0, "wall_ns": 9, "device_ns": null, "data_ns": 4}\n')
    append_steps(tmp_path, '{"step": 1, "wall_ns": 9, "device_ns": 7}\n')
    steps = StepFollower(tmp_path).read()
    assert (steps.seen, steps.unread) == (2, 0)
    assert steps.kept.device_ns is not None
    assert steps.kept.device_ns.tolist() == [-1, 7]
    assert steps.kept.phases_ns["data"].tolist() == [4, 0]
    assert steps.kept.elements is None


def test_a_block_that_is_packed_counts_once(tmp_path: Path) -> None:
    rows = make_rows([float(n) for n in range(1, 11)])
    write_steps(tmp_path, rows[:6])
    follower = StepFollower(tmp_path)
    assert follower.read().seen == 6
    write_part(tmp_path, 1, rows[:8])  # steps 6 and 7 were never seen in steps.jsonl
    replace_steps(tmp_path, rows[8:])
    steps = follower.read()
    assert steps.kept.number.tolist() == list(range(10))
    assert steps.kept.wall_ns.tolist() == [n * 1_000_000 for n in range(1, 11)]


def test_a_part_whose_steps_are_still_in_the_file_counts_once(tmp_path: Path) -> None:
    rows = make_rows([10.0] * 8)
    write_steps(tmp_path, rows)
    write_part(tmp_path, 1, rows[:5])
    follower = StepFollower(tmp_path)
    assert follower.read().seen == 8
    replace_steps(tmp_path, rows[5:])
    assert follower.read().seen == 8


def test_a_run_is_joined_in_the_middle(tmp_path: Path) -> None:
    """Parts first: the run began long before anybody looked."""
    rows = make_rows([10.0] * 9)
    write_part(tmp_path, 1, rows[:3])
    write_part(tmp_path, 2, rows[3:6])
    write_steps(tmp_path, rows[6:])
    assert StepFollower(tmp_path).read().kept.number.tolist() == list(range(9))


def test_a_damaged_part_is_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    rows = make_rows([10.0] * 4)
    (tmp_path / "steps-00001.json.gz").write_bytes(b"\x1f\x8bnothing")
    write_steps(tmp_path, rows[2:])
    steps = StepFollower(tmp_path).read()
    assert (steps.seen, steps.unread) == (2, 1)


def test_a_file_that_was_emptied_in_place_is_read_from_its_beginning(tmp_path: Path) -> None:
    rows = make_rows([10.0] * 6)
    write_steps(tmp_path, rows[:5])
    follower = StepFollower(tmp_path)
    follower.read()
    write_steps(tmp_path, rows[5:])
    assert follower.read().seen == 6


def test_gaps_stay_gaps_and_a_step_that_comes_again_does_not_count(tmp_path: Path) -> None:
    rows = make_rows([10.0] * 3) + make_rows([30.0] * 2, number=7) + make_rows([99.0], number=1)
    write_steps(tmp_path, rows)
    assert StepFollower(tmp_path).read().kept.number.tolist() == [0, 1, 2, 7, 8]


def test_phases_that_are_longer_than_their_step_are_not_captured(tmp_path: Path) -> None:
    write_steps(tmp_path, [{"step": 0, "wall_ns": 9, "data_ns": 5, "gc_ns": 5, "graphs": 2}])
    kept = StepFollower(tmp_path).read().kept
    assert kept.phases_ns == {}
    assert kept.graphs is not None


def test_windows_are_runs_of_profiled_steps(tmp_path: Path) -> None:
    profiled = [False, True, True, False, True, False]
    rows = make_rows([10.0] * 6, window=profiled)
    write_steps(tmp_path, rows[:2])
    follower = StepFollower(tmp_path)
    assert follower.read().windows == 1
    append_steps(tmp_path, as_text(rows[2:]))
    steps = follower.read()
    assert steps.windows == 2
    assert steps.plain == 3


def test_what_older_captures_lack_is_not_captured(tmp_path: Path) -> None:
    write_steps(tmp_path, [{"step": 0, "wall_ns": 5}, {"step": 1, "wall_ns": 6, "window": True}])
    kept = StepFollower(tmp_path).read().kept
    assert kept.phases_ns == {}
    assert kept.device_ns is None
    assert kept.allocated_bytes is None
    assert kept.epoch_gap_ns is None
    assert kept.end_unix_ns.tolist() == [0, 0]


def test_every_column_of_a_line_is_kept(tmp_path: Path) -> None:
    numbers = {
        "data": 10,
        "forward": 20,
        "backward": 5,
        "optimizer": 5,
        "other": 10,
        "evaluation": 20,
        "checkpoint": 10,
        "gc": 5,
        "compile": 5,
        "between_epochs": 10,
        "epoch_gap": 12,
        "device": 90,
        "cpu_wait": 8,
    }
    counts = dict(zip(("elements", "major_faults", "retries", "graphs"), (7, 2, 1, 4), strict=True))
    times = {f"{name}_ns": value for name, value in numbers.items()}
    row = {"step": 3, "wall_ns": 100, "first": True, "allocated_bytes": 0, **times, **counts}
    write_steps(tmp_path, [row])
    kept = StepFollower(tmp_path).read().kept
    assert sum(int(column[0]) for column in kept.phases_ns.values()) == 100
    names = ("epoch_gap_ns", "device_ns", "elements", "allocated_bytes", "cpu_wait_ns")
    for name in (*names, "major_faults", "retries", "graphs"):
        assert getattr(kept, name).tolist() == [row[name]], name
    assert kept.whole.tolist() == [False]


def test_a_long_run_is_sampled_without_a_period(tmp_path: Path) -> None:
    """Every fourth step takes 40 ms more: any regular choice would see all of them, or none."""
    walls = [50.0 if step % 4 == 3 else 10.0 for step in range(20_000)]
    write_steps(tmp_path, make_rows(walls))
    steps = StepFollower(tmp_path, most_kept=2_000).read()
    assert 900 < len(steps.kept) <= 2_000
    assert abs(steps.kept.wall_ns.mean() / 1e6 - 20.0) < 1.5
    assert steps.seen == 20_000
    assert steps.recent.number.tolist() == list(range(20_000 - RECENT, 20_000))


def test_the_sample_does_not_depend_on_when_it_was_looked_at(tmp_path: Path) -> None:
    rows = make_rows([10.0] * 3_000)
    write_steps(tmp_path, rows[:700])
    follower = StepFollower(tmp_path, most_kept=500)
    follower.read()
    append_steps(tmp_path, as_text(rows[700:]))
    at_once = StepFollower(tmp_path, most_kept=500).read()
    assert np.array_equal(follower.read().kept.number, at_once.kept.number)


@pytest.mark.parametrize("file", ["/proc/self/pagemap", "/dev/zero", "/dev/null"])
def test_a_file_that_never_ends_is_not_waited_for(tmp_path: Path, file: str) -> None:
    (tmp_path / "steps.jsonl").symlink_to(file)
    assert StepFollower(tmp_path).read().seen == 0
