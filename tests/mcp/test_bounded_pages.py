"""Answers in pages: bounded, whole together, with cursors that are checked."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import live_runs
from mcp_pages import pages_of
from shared_traces import GOLDEN
from stepscope.errors import UsageError
from stepscope.records.comparison import TriedConfiguration, TuneResult
from stepscope.ui.mcp.folders import AllowedFolders
from stepscope.ui.mcp.pages import (
    MOST_TOKENS,
    TEXT_TOKENS,
    CursorError,
    count_tokens,
    make_cursor,
    make_page,
    read_cursor,
    to_json,
)
from stepscope.ui.mcp.tools import TOOLS
from stepscope.ui.mcp.worker import Answers


def all_pages(answer: dict[str, Any]) -> int:
    """Count the pages; each is bounded and goes on after the one before."""
    start, pages = 0, 0
    while True:
        page = make_page(answer, "", start)
        assert count_tokens(to_json(page.body)) <= MOST_TOKENS - TEXT_TOKENS
        pages += 1
        if page.following is None:
            return pages
        assert page.following > start
        start = page.following


def test_very_long_names_fit() -> None:
    row = {"name": "\u4e00" * 9_999, "n" * 999: 1}
    assert all_pages({"verdict": "x" * 10_000, "rows": [row] * 30}) > 2


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=500),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(min_size=1), inner),
    max_leaves=60,
)


@settings(max_examples=10)
@given(st.dictionaries(st.text(min_size=1, max_size=40), _values, max_size=20))
def test_any_answer_ends_and_every_page_is_bounded(answer: dict[str, Any]) -> None:
    assert all_pages(answer) >= 1


def test_a_word_counts_by_letters_a_number_by_digits_a_mark_by_one() -> None:
    assert count_tokens("kernel") == 2
    assert count_tokens("0.123456") == 5
    assert count_tokens('{"a": 1}') == 7
    assert count_tokens("xqzjvk") == 4  # no word
    assert count_tokens("\u4e00") == 3


@given(st.text())
def test_what_is_no_cursor_is_refused(text: str) -> None:
    try:
        place, mark = read_cursor(text)
    except CursorError:
        return
    assert read_cursor(make_cursor(place, mark)) == (place, mark)


def test_a_cursor_of_another_question_or_another_answer_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    shutil.copy(GOLDEN / "cuda_step.json.gz", trace)
    first = Answers(AllowedFolders([tmp_path]))
    cursor = first.page("explain", {"path": "trace.json.gz"})["cursor"]
    asked = {"path": "trace.json.gz", "cursor": cursor}
    assert first.page("whatif", asked)["cannot_answer"]["kind"] == "cursor"
    # Another worker reads the run again, and finds the place.
    second = Answers(AllowedFolders([tmp_path]))
    assert second.page("explain", asked) == first.page("explain", asked)
    shutil.copy(GOLDEN / "cpu_stack_memory.json.gz", trace)
    changed = Answers(AllowedFolders([tmp_path])).page("explain", asked)
    assert changed["cannot_answer"]["kind"] == "cursor"
    assert "cannot_answer" not in first.page("explain", asked)  # it keeps the answer


@pytest.mark.parametrize("part", ["ranks[0].kernels", "findings", "budget", "verdict"])
def test_a_part_is_an_answer_of_its_own(part: str) -> None:
    answers = Answers(AllowedFolders([GOLDEN]))
    page = answers.page("explain", {"path": "h200-resnet18", "part": part})
    assert [name for name in page if name.startswith(part)]
    assert "why" not in page


@pytest.mark.parametrize("part", ["nowhere", "ranks[99]", "ranks.x", "[", "ranks[0", "x" * 9_999])
def test_an_unknown_part_names_those_that_exist(part: str) -> None:
    with pytest.raises(UsageError, match="there is no part"):
        make_page({"ranks": [1]}, part, 0)


def test_every_tool_says_in_one_form_what_is_wrong_with_its_arguments() -> None:
    answers = Answers(AllowedFolders([GOLDEN]))
    for tool in (*TOOLS, "no-such-tool"):
        said = answers.page(tool, {"bogus\x1b[2J": "\x1b[2J"})["cannot_answer"]
        assert said["kind"] == "wrong-use"
        assert said["reason"].isprintable()
    assert answers.page("explain", {"path": "x" * 9_999})["cannot_answer"]["kind"] == "wrong-use"


def test_parts_of_an_unchanged_run_are_not_explained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(GOLDEN / "cuda_step.json.gz", tmp_path / "trace.json.gz")
    asked: list[str] = []
    tool = TOOLS["explain"]

    def explain(question: Any, folders: AllowedFolders) -> dict[str, Any]:
        asked.append(question.part)
        return tool.answer(question, folders)

    monkeypatch.setitem(TOOLS, "explain", tool._replace(answer=explain))
    answers = Answers(AllowedFolders([tmp_path]))
    first = answers.page("explain", {"path": "trace.json.gz"})
    for part in ("ranks[0].kernels", "budget"):
        assert "cannot_answer" not in answers.page(
            "explain", {"path": "trace.json.gz", "part": part}
        )
    assert asked == [""]
    other = {"path": "trace.json.gz", "part": "ranks", "cursor": first["cursor"]}
    assert answers.page("explain", other)["cannot_answer"]["kind"] == "cursor"
    os.utime(tmp_path / "trace.json.gz", (1, 1))
    answers.page("explain", {"path": "trace.json.gz", "part": "budget"})
    assert asked == ["", "ranks", "budget"]


def test_a_run_that_is_still_written_is_answered(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    live_runs.write_run(run, process=live_runs.alive())
    answers = Answers(AllowedFolders([tmp_path]))
    assert "reason" in answers.page("explain", {"path": "run"})["cannot_answer"]
    rank = run / "rank-00000"
    live_runs.write_rank(rank)
    for count in (10, 40, 80):
        text = live_runs.as_text(live_runs.make_rows([10.0] * count))
        (rank / "steps.jsonl").write_text(text[:-7])  # cut short
        page = answers.page("explain", {"path": "run"})
        assert {"verdict", "cannot_answer"} & page.keys()
        assert "defect" not in to_json(page)
        assert answers.page("find_runs", {})["runs"][0]["state"] == "running"


def test_a_trace_that_was_cut_short_says_so_first(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN / "h200-resnet18", run)
    trace = run / "rank-00000/trace.json.gz"
    trace.write_bytes(trace.read_bytes()[:20_000])
    answers = Answers(AllowedFolders([tmp_path]))
    assert "the file is cut off" in answers.page("explain", {"path": "run"})["notes"][0]
    batch = answers.page("whatif", {"path": "run", "changes": ["batch=x2"]})
    assert "defect" not in to_json(batch)


@pytest.mark.parametrize("kind", ["cut", "noise", "empty", "short"])
def test_a_damaged_trace_is_answered_or_refused(kind: str, tmp_path: Path) -> None:
    whole = (GOLDEN / "cuda_step.json.gz").read_bytes()
    content = {"cut": whole[: len(whole) // 2], "noise": whole[::-1], "empty": b"", "short": b"{"}
    (tmp_path / "trace.json.gz").write_bytes(content[kind])
    page = Answers(AllowedFolders([tmp_path])).page("explain", {"path": "trace.json.gz"})
    assert kind == "cut" or page["cannot_answer"]["kind"] == "unreadable"
    assert "defect" not in to_json(page)


def test_find_runs_lists_the_golden_runs() -> None:
    answers = Answers(AllowedFolders([GOLDEN]))
    pages = list(pages_of(answers, "find_runs"))
    rows = [row for page in pages for name in page if name[:4] == "runs" for row in page[name]]
    assert {"h200-resnet18", "cpu-two-ranks"} <= {row["path"] for row in rows}
    resnet = next(row for row in rows if row["path"] == "h200-resnet18")
    assert answers.page("explain", {"path": resnet["id"]})["verdict"]
    assert answers.page("find_runs", {"name": "nothing-like-it"})["verdict"] == "0 runs found."


def test_a_name_that_is_no_utf8_has_an_id(tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff\xfe"))
    shutil.copytree(GOLDEN / "h200-resnet18", odd)
    answers = Answers(AllowedFolders([tmp_path]))
    (row,) = answers.page("find_runs", {})["runs"]
    assert to_json(row).isprintable()
    assert answers.page("explain", {"path": row["id"]})["verdict"]


def test_a_tune_that_has_ended_is_shown_page_by_page(tmp_path: Path) -> None:
    trial = TriedConfiguration(remedies=("bf16",), measured_ms=21.0, kept=True, why="faster")
    patch = "".join(f"+line {number} of the patch\n" for number in range(300))
    result = TuneResult(
        baseline_ms=38.0,
        best_ms=21.0,
        speedup=38 / 21,
        kept=("bf16",),
        trials=(trial,) * 20,
        patch=patch,
        verdict="bf16 makes the step 1.8 times faster",
    )
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune/tune.json").write_bytes(msgspec.json.encode(result))
    pages = list(pages_of(Answers(AllowedFolders([tmp_path])), "tune", folder="tune"))
    assert pages[0]["verdict"] == result.verdict
    lines = [line for page in pages for name in page if name[:5] == "patch" for line in page[name]]
    assert lines == patch.splitlines()
