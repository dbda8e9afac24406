"""Panes declare themselves: one file and a template are enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.ui.html import render as render_module
from stepscope.ui.html import report as report_module
from stepscope.ui.html.pane import Pane
from stepscope.ui.html.panes import find_panes
from stepscope.ui.html.render import has_page_file, read_page_file
from stepscope.ui.html.report import write_report


def test_every_pane_has_a_name_a_place_and_a_template_with_its_section():
    panes = find_panes()
    assert len({pane.id for pane in panes}) == len({pane.order for pane in panes}) == len(panes)
    assert [pane.order for pane in panes] == sorted(pane.order for pane in panes)
    for pane in panes:
        assert f'<section id="{pane.id}"' in read_page_file(f"{pane.id}.html.j2")
        if has_page_file(f"{pane.id}.js"):
            assert f'registerPane("{pane.id}"' in read_page_file(f"{pane.id}.js")


@pytest.fixture
def with_pane(monkeypatch, make_trace, explain, report, tmp_path):
    """A report with one more pane."""

    def write(pane: Pane, template: str) -> str:
        def read(name: str) -> str:
            return template if name == f"{pane.id}.html.j2" else read_page_file(name)

        monkeypatch.setattr(render_module, "read_page_file", read)
        monkeypatch.setattr(report_module, "find_panes", lambda: (*find_panes(), pane))
        render_module._environment.cache_clear()
        path: Path = tmp_path / "r.html"
        write_report(report(explain(make_trace())), [], path)
        render_module._environment.cache_clear()
        return path.read_text()

    return write


def test_a_new_pane_has_its_section_and_its_link(with_pane):
    pane = Pane(id="new", title="New", order=500, view=lambda report: len(report.explanation.ranks))
    text = with_pane(pane, '<section id="new">{{ view }} rank</section>')
    assert '<section id="new">1 rank</section>' in text
    assert '<a href="#new">New</a>' in text


def test_a_pane_without_anything_to_show_is_left_out(with_pane):
    pane = Pane(id="new", title="New", order=500, view=lambda _: None)
    text = with_pane(pane, '<section id="new"></section>')
    assert 'id="new"' not in text
    assert "#new" not in text
