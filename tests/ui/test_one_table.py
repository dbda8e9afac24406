"""A topic's table is one table: terminal and page show the same numbers of the same rows."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from server_runs import write_run
from stepscope.records.comparison import Comparison
from stepscope.ui.api import explain_paths
from stepscope.ui.html.comparison import write_comparison
from stepscope.ui.terminal.comparison import print_comparison
from stepscope.ui.topics.comparison import name_table, phase_table, phases_and_rest, run_table
from stepscope.ui.topics.section import Table
from stepscope.ui.topics.whatif import block_table, server_table, worker_table
from stepscope.verify.compare import compare

RUNS = Path(__file__).parents[1] / "lock/runs"
WIDE = 400


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare([str(RUNS / "whole-healthy")], [str(RUNS / "whole-keeps_tensors")], cache=False)


def tables_of(comparison: Comparison) -> list[Table[Any]]:
    return [
        phase_table(comparison, phases_and_rest(comparison)),
        run_table(comparison, WIDE),
        name_table(comparison.operators[:6], WIDE),
    ]


def numbers(words: str) -> list[float]:
    """Zero stands for what is too small for three digits."""
    return [float(text.replace(",", "")) for text in re.findall(r"\d[\d,]*(?:\.\d+)?", words)]


def check_columns(table: Table[Any]) -> None:
    for column in table.columns:
        if column.name is not None and column.title is not None and column.title[:1] == ">":
            for row in table.rows:
                shown, drawn = column.words(row), (column.page_words or column.words)(row)
                if numbers(shown) and numbers(drawn):
                    assert numbers(shown) == pytest.approx(numbers(drawn), abs=5e-4), column.title


def test_both_surfaces_have_the_numbers_of_a_comparison(
    comparison: Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_comparison(comparison, width=WIDE)
    printed = capsys.readouterr().out
    write_comparison(comparison, tmp_path / "page.html", cache=False)
    page = unescape(re.sub(r"<[^>]+>", " ", (tmp_path / "page.html").read_text()))
    for table in tables_of(comparison):
        check_columns(table)
        title, _, rows = table.for_terminal()
        assert title in printed
        for cells, text in ((rows, printed), (table.for_page().rows, page)):
            assert cells
            assert all(cell in text for row in cells for cell in row), table.title


def test_both_surfaces_have_the_numbers_of_a_parameter_server(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [[10, 10, 30], [10, 30, 10]], mode="bounded", bound=1)
    summary = explain_paths([run], cache=False, html=None, quiet=True).together
    assert summary is not None
    tables: list[Table[Any]] = [
        worker_table(summary.workers), block_table(summary.blocks), server_table(summary.shards)
    ]  # fmt: skip
    for table in tables:
        check_columns(table)
        assert len(table.for_page().rows) == len(table.for_terminal().rows)


def test_a_surface_without_a_heading_has_no_column(comparison: Comparison) -> None:
    table = run_table(comparison, WIDE)
    assert "path" in table.for_terminal().columns
    assert "path" not in table.for_page().columns
    assert "drift" not in [name.lstrip(">") for name in table.for_terminal("drift").columns]
