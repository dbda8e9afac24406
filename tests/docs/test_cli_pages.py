"""docs/reference/cli has one page per verb, and what it shows can be typed.

test_numbers.py holds that the generated parts are fresh.
"""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from catalogue import catalogue
from test_how_to import calls_of_stepscope, parse

from stepscope.ui.cli.verbs import VERBS

FOLDER = Path(__file__).parents[2] / "docs/reference/cli"
INDEX = FOLDER / "README.md"
PAGES = sorted(FOLDER.glob("*.md"))
MOST_WORDS = 9_500


def test_every_page_is_that_of_a_verb() -> None:
    assert {page.stem for page in PAGES} == {*VERBS, "README"}


@pytest.mark.parametrize("verb", VERBS)
def test_a_page_has_the_options_of_its_verb(verb: str) -> None:
    page = (FOLDER / f"{verb}.md").read_text()
    assert page.startswith(f"# stepscope {verb}\n")
    assert page.count(f"<!-- generated: verb {verb} -->") == 1
    assert page.count("<!-- generated: ") == page.count("<!-- end of generated -->") == 1


def test_the_index_lists_every_verb_once() -> None:
    index = INDEX.read_text()
    assert [verb for verb in VERBS if index.count(f"]({verb}.md)") != 1] == []
    for group in {entry.group for entry in catalogue()}:
        assert f"<!-- generated: verbs {group} -->" in index


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_can_be_typed(page: Path) -> None:
    calls = calls_of_stepscope(page)
    for call in calls:
        try:
            parse(call)
        except (click.UsageError, ValueError) as error:
            pytest.fail(f"stepscope {call}: {error}")
    assert calls or page == INDEX


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_nothing_on_a_page_reads_as_html(page: Path) -> None:
    """A browser would drop `<time>` outside code; a bar would end a cell of a table."""
    text = re.sub(r"(?ms)^```.*?^```$|<!--.*?-->", "", page.read_text())
    spans = re.findall(r"`[^`\n]*`", text)
    assert [span for span in spans if "|" in span] == []
    rest = re.sub(r"`[^`\n]*`|</?code>", "", text)
    assert re.findall(r"<\w+>", rest) == []


def test_pages_are_short() -> None:
    assert sum(len(page.read_text().split()) for page in PAGES) <= MOST_WORDS
