"""One file that is whole, escapes what it is given and asks nothing of the network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from stepscope.records.explanation import Budget
from stepscope.text.words import finding_page, sentence
from stepscope.ui.html.picture import draw_rank
from stepscope.ui.html.report import write_report


@pytest.fixture
def rank(make_trace, explain):
    return explain(make_trace())


@pytest.fixture
def picture(make_trace, rank):
    return draw_rank(make_trace(), rank)


def test_the_report_says_verdict_why_next_and_findings(rank, picture, report, tmp_path):
    write_report(report(rank), [picture], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    for words in (
        "Your GPU waits for the host 39% of every step.",
        "Data loading holds the device back",
        "Load batches in worker processes",
        "The device waits for data",
        "/home/me/train.py:31",
        "36.5 ms",
        "12 device events have no recorded launch.",
        "/runs/trace.json.gz",
        "The profiler itself slows the CPU",
    ):
        assert words in text
    assert "rank-picker" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_hostile_names_cannot_leave_their_place(make_trace, explain, report, hostile, tmp_path):
    trace = make_trace()
    trace = replace(trace, strings=tuple(hostile + text for text in trace.strings))
    trace = replace(trace, path=hostile)
    rank = explain(trace)
    said = report(rank)
    said = replace(
        said,
        verdict=hostile,
        why=hostile,
        next=hostile,
        findings=tuple(replace(f, title=hostile, evidence=(hostile,)) for f in said.findings),
    )
    write_report(said, [draw_rank(trace, rank)], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "<img" not in text
    assert "49" not in text.partition("<h1>")[2].partition("</h1>")[0]
    assert text.count("</script>") == 3  # the rank's data, shared words, the script


def test_nothing_is_fetched_and_only_our_script_may_run(rank, picture, report, tmp_path):
    write_report(report(rank), [picture], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    rules = policy.group(1).replace("&#39;", "'")
    assert "default-src 'none'" in rules
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/]+='", rules)
    assert not re.findall(r'(?:src|srcset|data|action)="https?:', text)
    assert not re.findall(r'<(?!a )[^>]*href="https?:', text)  # only links to click lead out
    links = re.findall(r'<a href="(https?:[^"]+)"([^>]*)>', text)
    assert all('rel="noopener' in rest and 'target="_blank"' in rest for _, rest in links)
    pages = {finding_page(finding.id) for finding in report(rank).findings}
    assert {address for address, _ in links} == {"https://ui.perfetto.dev", *pages}


def test_a_failed_write_leaves_the_old_report_alone(rank, picture, report, tmp_path, monkeypatch):
    path = tmp_path / "r.html"
    path.write_text("before")

    def fail(self, target):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(report(rank), [picture], path)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


def test_an_empty_trace_still_makes_a_report(empty_trace, explain, report, tmp_path):
    rank = explain(empty_trace)
    said = replace(report(rank), budget=Budget(step_ms=0.0, parts=(), basis="window"), findings=())
    write_report(said, [draw_rank(empty_trace, rank)], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "The trace holds no work to divide." in text
    assert 'id="findings"' not in text


def test_several_ranks_get_a_picker_and_one_without_a_picture_is_listed(
    make_trace, explain, report, tmp_path
):
    traces = [replace(make_trace(rank=rank), path=f"/runs/{rank}.json") for rank in (0, 1)]
    ranks = [explain(trace) for trace in traces]
    write_report(report(*ranks), [draw_rank(traces[0], ranks[0])], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert '<select id="rank-picker">' in text
    assert text.count('<script type="application/octet-stream"') == 2
    assert "Rank 1" in text


def test_sentences_start_with_a_capital_but_names_do_not():
    assert sentence("idle while the host ran") == "Idle while the host ran"
    assert sentence("torch.compile fuses") == "torch.compile fuses"
    assert sentence("all_reduce: 5 calls") == "all_reduce: 5 calls"
