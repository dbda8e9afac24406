"""What the terminal shows: nothing wider than asked, bars that fill the width, one vocabulary."""

from __future__ import annotations

import gzip
import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Group
from rich.table import Table

import stepscope
from jobs import Fault, Plan, make_job, profile_of
from stepscope.explain.job.all_ranks import join_ranks
from stepscope.records.explanation import Explanation
from stepscope.records.job import Job
from stepscope.records.run import STALL_CAUSES
from stepscope.text.figures import duration
from stepscope.ui.terminal.console import COLOURS, FILLS, cells_per_part, make_console
from stepscope.ui.terminal.distributed import job_sections
from stepscope.ui.terminal.explanation import print_explanation
from stepscope.ui.words import PARTS, short_kernel


@pytest.fixture
def two_ranks(tmp_path: Path) -> Explanation:
    for rank, slow in ((0, 1), (1, 3)):
        name = "void at::native::" + "very_long_kernel_name<" * 12
        events = [
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1,
             "tid": 1, "ts": 1000 * step, "dur": 1000}
            for step in range(3)
        ] + [
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1,
             "ts": 1000 * step + 10, "dur": 5, "args": {"correlation": step + 1}}
            for step in range(3)
        ] + [
            {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 1000 * step + 20,
             "dur": 100 * slow, "args": {"correlation": step + 1, "stream": 7, "device": 0}}
            for step in range(3)
        ]  # fmt: skip
        info = {"rank": rank, "world_size": 2}
        (tmp_path / f"rank{rank}.json.gz").write_bytes(
            gzip.compress(json.dumps({"distributedInfo": info, "traceEvents": events}).encode())
        )
    return stepscope.explain_job(tmp_path)


@pytest.mark.parametrize("width", [60, 72, 100, 160])
def test_no_line_is_wider_than_the_terminal(
    two_ranks: Explanation, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    print_explanation(two_ranks, width=width)
    shown = capsys.readouterr().out
    assert "verdict" in shown
    assert "rank" in shown
    for line in shown.splitlines():
        cells = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)
        assert cells <= width, line


def shown_of(job: Job, capsys: pytest.CaptureFixture[str], width: int = 100) -> str:
    make_console(width).print(Group(*job_sections(job, 8, width)))
    return capsys.readouterr().out


def test_several_ranks_get_a_line_each_for_straggler_clock_path_and_arrivals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = make_job(Plan(ranks=4, rounds=20, fault=Fault(cause="compute", size=1.5, place=2)))
    shown = shown_of(join_ranks(made.parts, [profile_of(made.plan)]), capsys)
    assert "Rank 2 holds the others back" in shown
    assert "Clocks are aligned within ±" in shown
    assert "from collectives and rounds" in shown
    assert "rank 2's work" in shown
    assert "rank 2 4" in shown.split("arrives last")[1]
    assert "all_reduce" in shown


def test_clocks_that_are_not_aligned_are_said_to_be_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = shown_of(join_ranks(make_job(Plan(ranks=4, jump=(1, 5e8))).parts), capsys)
    assert "Clocks are not aligned" in shown
    assert "not known: the ranks' clocks are not aligned" in shown
    assert "critical path" not in shown


@pytest.mark.parametrize("width", [60, 72, 84, 100, 140])
def test_many_collectives_stay_within_the_terminal(
    capsys: pytest.CaptureFixture[str], width: int
) -> None:
    made = make_job(Plan(ranks=32, form="mixed", steps=3, rounds=20))
    shown = shown_of(join_ranks(made.parts, [profile_of(made.plan)]), capsys, width)
    assert all(len(line) <= width for line in shown.splitlines())
    assert "more: see --json" in shown
    assert "…" not in shown.replace("… ", "")


def test_of_many_ranks_the_slowest_and_the_fastest_are_listed(
    two_ranks: Explanation, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, fast = two_ranks.ranks
    ranks = [replace(slow if place == 700 else fast, rank=place) for place in range(1024)]
    pace = replace(slow.part.pace, dur_ns=slow.part.pace.dur_ns * 9)
    ranks[700] = replace(ranks[700], part=replace(slow.part, pace=pace))
    print_explanation(replace(two_ranks, ranks=tuple(ranks), job=None))
    lines = capsys.readouterr().out.split("slowest first")[1].split("findings")[0]
    rows = [line.split() for line in lines.splitlines() if line.strip()][1:]
    assert rows[0][0] == "700"
    assert [row[0] for row in rows].index("…") == 5
    assert rows[5][1:] == ["1016", "more"]
    assert len(rows) == 9


def test_every_part_has_a_word_and_a_colour(two_ranks: Explanation) -> None:
    ids = {part.id for part in two_ranks.budget.parts}
    assert ids | {f"stall_{cause}" for cause in STALL_CAUSES} == set(PARTS)
    assert list(PARTS) == list(COLOURS)
    assert len(set(FILLS.values())) == len(FILLS)


@given(
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=10).filter(lambda s: sum(s) > 0.01),
    width=st.integers(20, 200),
)
def test_bar_fills_the_width_and_hides_no_visible_part(shares: list[float], width: int) -> None:
    shares = [share / sum(shares) for share in shares]
    cells = cells_per_part(shares, width)
    assert sum(cells) == width
    for share, count in zip(shares, cells, strict=True):
        assert count > 0 or share * width < 1
        assert abs(count - share * width) <= len(shares)


@pytest.mark.parametrize(
    ("ns", "text"),
    [(0, "0 ns"), (999, "999 ns"), (1500, "1.50 µs"), (2_500_000, "2.50 ms"), (3.2e9, "3.20 s"),
     (123_000_000, "123 ms")],
)  # fmt: skip
def test_durations_are_short(ns: float, text: str) -> None:
    assert duration(ns) == text


def test_kernel_names_lose_noise_and_the_middle() -> None:
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::Add>(int, float)"
    assert short_kernel(name, 80) == "vectorized_elementwise_kernel<4, Add>"
    assert len(short_kernel(name, 20)) == 20
    assert "…" in short_kernel(name, 20)


def test_names_from_files_are_text_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "[/nowhere] [bold]x[/bold] :heart: \x1b[31mred\x1b[0m \x9b2J \u202eabc"
    console = make_console(100)
    table = Table("name")
    table.add_row(hostile)
    console.print(table)
    console.print(hostile)
    printed = capsys.readouterr().out
    assert printed.count("[/nowhere] [bold]x[/bold] :heart: ␛[31mred␛[0m �2J �") == 2
    assert not set(printed) & set("\x1b\x9b\u202e")
