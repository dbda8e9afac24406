"""The whole run in explain's terminal: one line on the short screen, tables with --full."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Group

import stepscope
from stepscope.records.run import (
    STALL_CAUSES,
    AccountPart,
    LevelChange,
    RankRun,
    RunAccount,
    Stall,
    StepSeries,
    StepTimes,
    WholeRun,
)
from stepscope.records.source_lines import Place
from stepscope.ui.terminal.console import LETTERS, draw_steps, make_console, mark_stalls
from stepscope.ui.terminal.short import MOST_LINES, short_lines
from stepscope.ui.terminal.whole_run import run_line, run_sections

MS = 1_000_000


def make_series(step_ms: list[float], causes: dict[int, str], *, warm_up: int = 0) -> StepSeries:
    count = len(step_ms)
    cause = np.full(count, -1, np.int8)
    for place, name in causes.items():
        cause[place] = STALL_CAUSES.index(name)  # type: ignore[arg-type]
    step_ns = np.array(step_ms) * MS
    return StepSeries(
        number=np.arange(count),
        start_unix_ns=np.arange(count),
        step_ns=step_ns.astype(np.int64),
        cause=cause,
        window=np.zeros(count, np.bool_),
        warm_up=warm_up,
    )


TIMES = StepTimes(
    steps=1000,
    mean_ms=55.0,
    low_ms=54.0,
    high_ms=56.0,
    median_ms=37.0,
    typical_ms=36.0,
    p99_ms=112.0,
    longest_ms=4000.0,
    variation=0.012,
)
STALLS = (
    Stall(
        cause="data",
        steps=250,
        cost_ms=18.0,
        share=0.33,
        typical_ms=70.0,
        longest_ms=90.0,
        period=4,
        where=(Place(file="/home/me/data.py", line=88),),
    ),
    Stall(
        cause="evaluation",
        steps=0,
        cost_ms=0.0,
        share=0.0,
        typical_ms=0.0,
        longest_ms=0.0,
        between_epochs_ms=2.5,
    ),
)
CHANGE = LevelChange(step=300, low=296, high=303, before_ms=31.0, after_ms=62.0)
SHARES = {
    "start_up": 0.09,
    "training": 0.84,
    "evaluation": 0.045,
    "windows": 0.02,
    "outside": 0.005,
}
ACCOUNT = RunAccount(
    wall_ms=71_200.0,
    goodput=0.84,
    parts=tuple(
        AccountPart(id=name, ms=712 * 100 * share, share=share) for name, share in SHARES.items()
    ),
)
RANK = RankRun(
    rank=0,
    steps=1081,
    warm_up=0,
    times=TIMES,
    stalls=STALLS,
    changes=(CHANGE,),
    account=ACCOUNT,
    series=make_series([10.0] * 40 + [90.0] * 2 + [10.0] * 38, {40: "data", 41: "data"}),
)
RUN = WholeRun(ranks=(RANK,), account=ACCOUNT)


def test_the_run_in_one_line() -> None:
    line = run_line(RUN, 90)
    assert line is not None
    assert line.plain == (
        "1,081 steps in 71.2 s: steady training 84%, start-up 9.0%, evaluation 4.5% · ▃▃▃▃▃▃█▃▃▃▃▃▃"
    )


@pytest.mark.parametrize("room", [20, 40, 50, 70, 150])
def test_the_line_fits(room: int) -> None:
    line = run_line(RUN, room)
    assert line is not None
    assert cell_len(line.plain) <= room


def test_ranks_with_different_counts_are_a_range() -> None:
    line = run_line(WholeRun(ranks=(RANK, replace(RANK, rank=1, steps=1080))), 100)
    assert line is not None
    assert line.plain.startswith("1,080 to 1,081 steps: mean 55.0 ms (54.0 to 56.0), median 37.0")


def test_a_run_without_steps_has_no_line() -> None:
    assert run_line(WholeRun(ranks=()), 80) is None
    none = RankRun(rank=0, steps=0, warm_up=0, times=None)
    assert run_line(WholeRun(ranks=(none,)), 80) is None


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_short_screen_has_room_for_the_line(golden: Path, width: int) -> None:
    explanation = stepscope.explain_job(golden / "cpu-two-ranks", cache=False)
    explanation = replace(explanation, run=RUN)
    long = replace(explanation, verdict="word " * 200, why="word " * 200, next="word " * 200)
    long = replace(long, findings=explanation.findings * 3)
    for screen in (explanation, long):
        lines = short_lines(screen, make_console(width), more="more", report=Path("report.html"))
        assert len(lines) <= MOST_LINES
        assert any(line.plain.startswith("run       1,081 steps in 71.2 s") for line in lines)
        assert max(cell_len(line.plain) for line in lines) <= width


def full(run: WholeRun, width: int, capsys: pytest.CaptureFixture[str]) -> str:
    make_console(width).print(Group(*run_sections(run, width)))
    return "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())


def test_full_prints_account_steps_stalls_and_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        full(RUN, 80, capsys)
        == """\
wall time 71.2 s, goodput 84%
                         time  share
start-up               6.41 s   9.0%
steady training        59.8 s    84%
evaluation             3.20 s   4.5%
stepscope's profiling  1.42 s   2.0%
outside any step       356 ms   0.5%

steps of the whole run
rank  steady     mean  typical   median     p99   longest  varies
   0   1,000  55.0 ms  36.0 ms  37.0 ms  112 ms  4,000 ms    1.2%

stalls: steps that take longer than a typical one
cause        rank  cost a step  share  steps  every  one takes  where
data stalls     0      18.0 ms    33%    250      4    70.0 ms  data.py:88
evaluation      0      2.50 ms

changes of the typical step
rank  from step     between   before    after  times
   0        300  296 to 303  31.0 ms  62.0 ms    2.0
"""
    )


def test_each_rank_has_its_own_account(capsys: pytest.CaptureFixture[str]) -> None:
    slow = replace(ACCOUNT, parts=(replace(ACCOUNT.parts[0], share=0.2), *ACCOUNT.parts[1:]))
    run = WholeRun(ranks=(RANK, replace(RANK, rank=1, account=slow)), account=ACCOUNT)
    assert "start-up               6.41 s   9.0%    9.0%     20%" in full(run, 80, capsys)


@pytest.mark.parametrize("width", [60, 72, 120])
def test_no_table_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], width: int
) -> None:
    ranks = tuple(replace(RANK, rank=rank, attempt=1 + rank % 2) for rank in range(12))
    shown = full(WholeRun(ranks=ranks, account=ACCOUNT), width, capsys)
    assert max(map(cell_len, shown.splitlines())) <= width
    assert "…" not in shown


# The line of characters.


def test_a_flat_run_is_a_flat_line() -> None:
    assert draw_steps(make_series([10.0] * 100, {}), 10).plain == "▃" * 10


def test_twice_the_time_is_twice_the_height() -> None:
    series = make_series([10.0] * 50 + [20.0] * 50, {})
    assert draw_steps(series, 4).plain == "▂▂▄▄"


def test_one_step_that_takes_a_minute_hides_no_other() -> None:
    series = make_series([10.0] * 50 + [60_000.0] + [20.0] * 49, {50: "unknown"})
    assert draw_steps(series, 100).plain[:3] == "▁▁▁"
    assert draw_steps(series, 100).plain[50:53] == "█▂▂"


def test_stalls_are_marked_with_the_letter_of_their_cause() -> None:
    series = make_series([10.0] * 20 + [40.0] + [10.0] * 19, {20: "checkpoint"})
    assert mark_stalls(series, 4).plain == "··c·"
    assert mark_stalls(make_series([10.0] * 8, {}), 4).plain == ""


def test_every_cause_has_a_letter_of_its_own() -> None:
    assert set(LETTERS) == set(STALL_CAUSES)
    assert len(set(LETTERS.values())) == len(STALL_CAUSES)


def test_warm_up_is_left_out_and_a_short_run_takes_less_room() -> None:
    series = make_series([900.0, 10.0, 10.0, 10.0], {}, warm_up=1)
    assert draw_steps(series, 40).plain == "▃▃▃"
    assert draw_steps(make_series([], {}), 40).plain == ""
