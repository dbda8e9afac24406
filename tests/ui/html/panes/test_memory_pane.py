"""The report's page about memory: what it says, what it draws, that it escapes what it is given."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

import snapshots
from stepscope.explain.explain_job import JobTraces
from stepscope.records.memory import SiteBytes
from stepscope.ui.html.panes.memory import memory_view
from stepscope.ui.html.picture import draw_rank
from stepscope.ui.html.render import render_part
from stepscope.ui.html.report import write_report
from stepscope.ui.html.svg import round_values
from stepscope.ui.terminal.explanation import print_explanation

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture
def run(golden):
    return _drawn(golden / "h200-resnet18")


@pytest.fixture
def snapshot(tmp_path):
    path = snapshots.write(tmp_path / "oom.pickle", _failed().snapshot())
    return _drawn(path)


def _drawn(path):
    def draw(analysis, rank):
        return draw_rank(analysis.trace, rank)

    return JobTraces([path], cache=False).explain(draw)


def _failed():
    device = snapshots.training()
    device.fail(8_000_000, 1_000_000, snapshots.MODEL)
    return device


def _report(explained, path):
    write_report(*explained, path)
    return path.read_text()


def test_a_run_folder_shows_its_peak_its_moments_and_what_fits(run, tmp_path):
    text = _report(run, tmp_path / "r.html")
    page = text.partition('<section id="memory"')[2].partition("</section>")[0]
    for words in (
        "Peak 3.07 GB in forward, 5.10 GB reserved",
        "What holds the peak",
        "Activations",
        "2.75 GB",
        "At the moments of the step",
        "after backward",
        "What batch fits",
        "now 128",
        "limit 150 GB",
        "Sharding by formula",
        "1.5x",
        "Activations by module",
    ):
        assert words in page
    assert '<a href="#memory">Memory</a>' in text
    assert page.count("<svg") >= 2


def pane_text(rank, *, drawn):
    return str(render_part("memory.html.j2", view=[("Rank 0", memory_view(rank, drawn=drawn))]))


def test_bars_of_the_peak_are_as_wide_as_their_bytes(run):
    (rank,) = run[0].ranks
    page = pane_text(rank, drawn=True)
    shares = [float(each) for each in re.findall(r"flex-grow: ([\d.e-]+)", page)]
    assert sum(shares) == pytest.approx(1)


def test_a_snapshot_has_a_page_and_no_empty_timeline(snapshot, tmp_path):
    text = _report(snapshot, tmp_path / "r.html")
    page = text.partition('<section id="memory"')[2].partition("</section>")[0]
    assert "Through the history" in page
    assert "/home/me/model.py:31" in page
    assert "Failed requests" in page
    assert "Largest free block" in page
    for section in ("timeline", "tables", "perfetto"):
        assert f'<section id="{section}"' not in text
    assert "of memory" in text  # the finding's share


def test_names_cannot_leave_their_place(run, tmp_path):
    explanation, pictures = run
    (rank,) = explanation.ranks
    site = SiteBytes(operator=HOSTILE, size_bytes=5, blocks=1, file=HOSTILE, line=1)
    memory = replace(rank.memory, by_site=(site,), notes=(HOSTILE,), phase=HOSTILE)
    changed = replace(explanation, ranks=(replace(rank, memory=memory),))
    assert "<img" not in _report((changed, pictures), tmp_path / "r.html")


def test_a_rank_that_is_not_drawn_keeps_its_figures(run):
    (rank,) = run[0].ranks
    page = pane_text(rank, drawn=False)
    assert "<svg viewBox" not in page
    assert "3.07 GB" in page


def test_ticks_are_round_and_few():
    assert round_values(12.0, 6) == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert round_values(0, 6) == []
    assert len(round_values(9.9e10, 5)) <= 6


def test_the_terminal_says_the_same(run, capsys):
    print_explanation(run[0], width=100)
    said = capsys.readouterr().out
    assert "memory  peak 3.07 GB in forward, 5.10 GB reserved, 2.0% of 150 GB" in said
    assert "activations       2.75 GB   89%" in said
    assert "the largest batch in 150 GB (the device's memory) is about 5,868" in said
    assert "ZeRO" not in said  # one process shares with nobody


def test_the_terminal_tells_a_snapshot_without_a_step(snapshot, capsys):
    print_explanation(snapshot[0], width=100)
    said = capsys.readouterr().out
    assert said.startswith("oom.pickle · memory snapshot · 23 events")
    assert "Out of memory" in said
    assert "model.py:31" in said
    assert "ms a step" not in said


@pytest.mark.browser
def test_in_a_browser_the_page_draws_follows_the_pointer_and_stays_silent(
    snapshot, visit, tmp_path
):
    path = tmp_path / "r.html"
    write_report(*snapshot, path)
    page = visit(path)
    page.locator(".mem-line svg[data-memory]").hover()
    tip = page.locator(".mem-line .tip")
    assert tip.is_visible()
    assert "reserved 10.5 MB" in tip.inner_text()
    assert page.locator("#timeline").is_hidden()
