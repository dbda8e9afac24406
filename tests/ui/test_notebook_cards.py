"""Cards in notebooks: the compact report, from names that do harm where they are not escaped."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace

import stepscope
from hostile_names import HOSTILE, PLACES
from stepscope.records.comparison import Difference, PhaseChange
from stepscope.records.explanation import Explanation, Place
from stepscope.text.figures import factor

RUN = Path(__file__).parent.parent / "golden/h200-resnet18"
TAGS = {"div", "span", "table", "tbody", "tr", "td"}
ATTRIBUTES = {"style", "title"}


class _Checked(HTMLParser):
    """Plain boxes only, each of them closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open
        assert html.isprintable()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        for name, value in attrs:
            assert name in ATTRIBUTES
            assert "url(" not in (value or "")
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


@pytest.fixture(scope="module")
def run() -> Explanation:
    return stepscope.explain(RUN, cache=False)


def test_an_explanation_has_verdict_parts_findings_what_ifs_and_next(run: Explanation) -> None:
    text = _Checked(run._repr_html_()).text
    for words in (run.verdict, run.next, run.findings[0].title, run.advice[0].setting, "Compute"):
        assert words in text
    assert "rank 0" not in text  # there is no other


def test_findings_of_several_ranks_name_theirs_and_their_place(run: Explanation) -> None:
    finding = replace(run.findings[0], rank=3, where=(Place(file="train.py", line=7),))
    several = replace(run, ranks=run.ranks * 2, findings=(finding,))
    assert f"{finding.title}, rank 3 (train.py:7)" in _Checked(several._repr_html_()).text


def test_a_prediction_shows_both_steps_with_the_interval() -> None:
    found = stepscope.whatif(RUN, "precision=bf16", cache=False)
    text = _Checked(found._repr_html_()).text
    assert "What if precision=bf16" in text
    assert "now" in text
    assert "with it" in text


def test_a_prediction_for_another_batch_counts_samples() -> None:
    found = stepscope.whatif(RUN, "batch=x2", cache=False)
    text = _Checked(found._repr_html_()).text
    assert found.speedup < 1 < found.throughput_factor
    assert f"{factor(found.throughput_factor)} times as many samples per second" in text
    assert "times as fast" not in text


def test_a_comparison_shows_what_moved_most() -> None:
    same = stepscope.compare(RUN, RUN)
    phases = tuple(
        PhaseChange(id=name, a_ms=5, b_ms=5 + change, change_ms=change, low_ms=0, high_ms=0)
        for name, change in (("data", 0.5), ("forward", -3.0), ("backward", 0.0))
    )
    found = replace(
        same, phases=phases, stalls=(), config=(Difference(name="tf32", a=None, b="on"),)
    )
    text = _Checked(found._repr_html_()).text
    assert text.index("forward") < text.index("data")
    assert "backward" not in text
    assert "tf32: not set -> on" in text


@pytest.mark.parametrize("place", ["kernels", "frames"])
def test_names_from_a_trace_are_text(place: str, tmp_path: Path) -> None:
    found = stepscope.explain(PLACES[place](tmp_path), cache=False)
    hostile = replace(found.findings[0], title=HOSTILE, where=(Place(file=HOSTILE, line=1),))
    _Checked(replace(found, verdict=HOSTILE * 50, findings=(hostile,))._repr_html_())
