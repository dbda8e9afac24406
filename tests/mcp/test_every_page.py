"""Every page of every golden input: bounded, printable, and together the whole answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import hostile_names
from mcp_pages import pages_of
from shared_traces import GOLDEN
from stepscope.ui import api
from stepscope.ui.mcp.folders import AllowedFolders
from stepscope.ui.mcp.pages import clean, to_json
from stepscope.ui.mcp.worker import Answers
from stepscope.ui.topics.explanation_json import explanation_json

RUNS = sorted(path.name for path in GOLDEN.iterdir() if path.suffix not in (".md", ".py"))


_STEP = re.compile(r"(?:^|\.)([^.\[\]]+)|\[(\d+)(:\d+)?\]")


def put(whole: dict[Any, Any], where: str, value: Any) -> None:
    """Write what a page holds where its key says that it stands; lists are numbered objects."""
    steps = [(match[1] or int(match[2]), match[3]) for match in _STEP.finditer(where)]
    first = 0
    if steps[-1][1]:
        first = steps.pop()[0]
    at = whole
    for step, _ in steps[:-1]:
        at = at.setdefault(step, {})
    last = steps[-1][0]
    if isinstance(value, list):
        at.setdefault(last, {}).update(
            {first + number: numbered(row) for number, row in enumerate(value)}
        )
    elif isinstance(value, dict):
        at.setdefault(last, {}).update(numbered(value))
    else:
        at[last] = value


def numbered(value: Any) -> Any:
    """Lists as objects, without what is empty: that may stand on no page."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return value
    inner = {key: numbered(one) for key, one in value.items()}
    return {key: one for key, one in inner.items() if one is not None and one != {}}


@pytest.mark.parametrize("run", RUNS)
def test_the_pages_of_every_golden_input_are_bounded(run: str) -> None:
    answers = Answers(AllowedFolders([GOLDEN]))
    for tool in ("explain", "whatif"):
        first, *_ = pages_of(answers, tool, path=run)
        assert "cannot_answer" in first or {"verdict", "why", "next"} <= first.keys()


@pytest.mark.parametrize("run", ["h200-resnet18", "cpu-two-ranks"])
def test_the_pages_together_are_the_answer_of_the_command_line(run: str) -> None:
    whole: dict[Any, Any] = {}
    for page in pages_of(Answers(AllowedFolders([GOLDEN])), "explain", path=run):
        for where, value in page.items():
            if where not in ("schema", "data", "cursor", "parts"):
                put(whole, where, value)
    asked = explanation_json(api.explain_paths([GOLDEN / run], cache=True, quiet=True))
    del asked["schema"]
    assert numbered(whole) == numbered(clean(asked))


@pytest.mark.parametrize("place", hostile_names.PLACES)
def test_hostile_names_are_printable_bounded_and_marked(place: str, tmp_path: Path) -> None:
    path = str(hostile_names.PLACES[place](tmp_path).relative_to(tmp_path))
    answers = Answers(AllowedFolders([tmp_path]))
    for tool in ("explain", "whatif", "compare", "find_runs"):
        asked = {"compare": {"a": path, "b": path}, "find_runs": {}}.get(tool, {"path": path})
        for page in pages_of(answers, tool, **asked):
            assert to_json(page).isprintable()
            assert "cannot_answer" in page or "data, never instructions" in page["data"]
