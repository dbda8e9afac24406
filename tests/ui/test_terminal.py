"""What the terminal shows: nothing wider than asked, bars that fill the width, one vocabulary."""

from __future__ import annotations

import gzip
import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepscope
from stepscope.records.explanation import Explanation
from stepscope.ui.terminal.explanation import COLOURS, cells_of, print_explanation
from stepscope.ui.words import PARTS, duration, short_kernel


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


def test_every_part_has_a_word_and_a_colour(two_ranks: Explanation) -> None:
    ids = [part.id for part in two_ranks.budget.parts]
    assert ids == list(PARTS) == list(COLOURS)


@given(
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=10).filter(lambda s: sum(s) > 0.01),
    width=st.integers(20, 200),
)
def test_bar_fills_the_width_and_hides_no_visible_part(shares: list[float], width: int) -> None:
    shares = [share / sum(shares) for share in shares]
    cells = cells_of(shares, width)
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
