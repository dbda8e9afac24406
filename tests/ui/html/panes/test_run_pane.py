"""The Run section: its data block holds every step, and its words and tables are the run's."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from made_runs import PLANTED, PlantedStall, make_run
from stepscope.records.job import HostClock
from stepscope.records.run import (
    ACCOUNT,
    STALL_CAUSES,
    WITHOUT_GRADIENTS,
    AccountPart,
    RankRun,
    RunAccount,
    StepSeries,
    WholeRun,
)
from stepscope.ui.html.pane import ReportData
from stepscope.ui.html.panes.run import run_view
from stepscope.ui.html.render import read_page_file
from stepscope.ui.html.report import write_report
from stepscope.ui.html.run_points import (
    account_bars,
    encode_run,
    how_often,
    on_one_clock,
    stall_rows,
    thin,
)
from stepscope.ui.words import ACCOUNT_PARTS, PARTS, STALLS


@pytest.fixture
def view(make_trace, explain, report):
    """The section as the page shows it."""

    def show(run):
        explanation = replace(report(explain(make_trace())), run=run)
        return run_view(ReportData(explanation=explanation, ranks=explanation.ranks))

    return show


def series_of(step_ms, *, start_ns=None, window=None, cause=None, warm_up=0):
    step_ns = (np.array(step_ms) * 1e6).astype(np.int64)
    many = len(step_ns)
    return StepSeries(
        number=np.arange(many),
        start_unix_ns=np.array(start_ns if start_ns is not None else [10**18] * many),
        step_ns=step_ns,
        cause=np.array(cause if cause is not None else [-1] * many, np.int8),
        window=np.array(window if window is not None else [False] * many),
        warm_up=warm_up,
    )


def rank_of(series, **fields):
    known = {"rank": 0, "steps": len(series.number), "warm_up": series.warm_up, "times": None}
    return RankRun(**known | fields, series=series)


def read_series(payload, decode, unzigzag, place=0):
    """Numbers, starts in µs, and step times, as run_series.js reads them."""
    head, columns = decode(payload)
    step = columns[f"{place}-step"]
    number = np.cumsum(unzigzag(columns[f"{place}-number"]) + 1) - 1
    unit = head["unit_us"]
    lasted = np.concatenate([[0], step[:-1] // unit])
    start = np.cumsum(unzigzag(columns[f"{place}-start"]) + lasted) * unit
    return head, columns, number, start, step


def test_every_step_survives_the_round_trip(decode, unzigzag):
    run = make_run(5_000, 3)
    points = encode_run(run.ranks)
    assert points.drawn == points.all_steps == 15_000
    for place, rank in enumerate(run.ranks):
        series = rank.series
        head, columns, number, start, step = read_series(points.payload, decode, unzigzag, place)
        assert (number == series.number).all()
        assert (np.abs(step * 1000 - series.step_ns) <= 500).all()
        since = (series.start_unix_ns - run.ranks[0].series.start_unix_ns[0]) / 1e3
        assert (np.abs(start - since) <= head["unit_us"]).all()
        assert (columns[f"{place}-cause"] - 1 == series.cause).all()
        assert (columns[f"{place}-window"] == series.window).all()
    assert [one["rank"] for one in head["series"]] == [0, 1, 2]
    assert head["series"][0]["warm_up"] == 10


def test_steps_of_hosts_whose_clocks_differ_are_drawn_side_by_side(decode, unzigzag):
    """Rank 1's host is 3 s ahead; rank 2's was never compared."""
    run = make_run(100, 3)
    clock = SimpleNamespace(
        hosts=[
            HostClock(host="node0", ranks=(0,), offset_ns=0),
            HostClock(host="node1", ranks=(1,), offset_ns=3_000_000_000),
            HostClock(host="node2", ranks=(2,)),
        ]
    )
    series = run.ranks[1].series
    ahead = replace(series, start_unix_ns=series.start_unix_ns + 3_000_000_000)
    shifted = [run.ranks[0], replace(run.ranks[1], series=ahead), run.ranks[2]]
    job = SimpleNamespace(clock=clock)
    drawn = encode_run(on_one_clock(shifted, job)).payload
    assert drawn == encode_run(run.ranks).payload
    assert on_one_clock(run.ranks, None) == list(run.ranks)


def test_the_mean_of_several_ranks_is_that_of_the_steps_that_count():
    run = make_run(100, 2)
    ranks = [
        replace(rank, times=replace(rank.times, mean_ms=mean, steps=steps))
        for rank, mean, steps in zip(run.ranks, (10.0, 40.0), (20, 10), strict=True)
    ]
    assert encode_run(ranks).middle_us["mean"] == pytest.approx(20_000)


def test_starts_are_exact_to_a_small_part_of_a_step(decode):
    head, _ = decode(encode_run(make_run(100, 1).ranks).payload)
    assert head["unit_us"] == 1_000  # steps of 36 ms
    head, _ = decode(encode_run([rank_of(series_of([0.4] * 9))]).payload)
    assert head["unit_us"] == 10


def test_a_thinned_series_keeps_its_extremes_and_the_edges_of_windows():
    series = make_run(20_000, 1, windows=(0.4,)).ranks[0].series
    kept = thin(series, 1_000)
    assert len(kept) <= 1_010
    assert (np.diff(kept) > 0).all()
    assert kept[0] == 0
    assert kept[-1] == 19_999
    for stretch in np.array_split(np.arange(20_000), 500):
        own = series.step_ns[stretch]
        inside = series.step_ns[kept[(kept >= stretch[0]) & (kept <= stretch[-1])]]
        assert (inside.min(), inside.max()) == (own.min(), own.max())
    window = np.flatnonzero(series.window)
    assert {window[0], window[-1]} <= set(kept.tolist())


def test_of_thinned_steps_the_mean_of_calm_ones_is_kept(decode):
    run = make_run(20_000, 1, slower_from=1)
    points = encode_run(run.ranks, most=1_000)
    assert points.drawn < 1_010
    _, columns = decode(points.payload)
    series = run.ranks[0].series
    calm = series.step_ns[(series.cause < 0) & ~series.window] / 1e3
    assert np.median(columns["0-calm"]) == pytest.approx(np.median(calm), rel=0.005)


def test_what_is_left_out_is_said(view, monkeypatch):
    run = make_run(3_000, 2)
    assert view(run)["notes"] == []
    monkeypatch.setattr(
        "stepscope.ui.html.panes.run.encode_run", lambda ranks: encode_run(ranks, most=500)
    )
    (note,) = view(run)["notes"]
    assert "of 6,000 steps are drawn: the shortest and the longest of each stretch" in note


def test_a_clock_that_was_set_back_does_not_turn_time_around(decode, unzigzag):
    start = [10**18 + i * 50_000_000 for i in range(6)]
    start[3:] = [at - 3_600 * 10**9 for at in start[3:]]
    points = encode_run([rank_of(series_of([40.0] * 6, start_ns=start))])
    _, _, _, since_us, _ = read_series(points.payload, decode, unzigzag)
    assert since_us.tolist() == [0, 50_000, 100_000, 140_000, 190_000, 240_000]


def test_without_a_clock_steps_follow_each_other(decode, unzigzag):
    points = encode_run([rank_of(series_of([40.0, 60.0, 40.0], start_ns=[0, 0, 0]))])
    head, _, _, since_us, _ = read_series(points.payload, decode, unzigzag)
    assert head["zero_ms"] == 0
    assert since_us.tolist() == [0, 40_000, 100_000]


def test_attempts_lie_one_after_another(decode, view):
    first, second = make_run(600, 1).ranks[0], make_run(900, 1).ranks[0]
    run = WholeRun(ranks=(first, replace(second, attempt=2)))
    head, _ = decode(encode_run(run.ranks).payload)
    assert [one["offset"] for one in head["series"]] == [0, 600]
    shown = view(run)
    assert shown["names"] == ["rank 0, attempt 1", "rank 0, attempt 2"]
    assert shown["facts"][0][:2] == ("Steps", "1,500")


def test_the_distribution_holds_every_steady_step_once(decode):
    run = make_run(4_000, 2)
    head, columns = decode(encode_run(run.ranks).payload)
    counts = columns["bins"].reshape(2, len(STALL_CAUSES) + 1, -1)
    for rank, own in zip(run.ranks, counts, strict=True):
        assert own.sum() == rank.times.steps
        data = next(stall for stall in rank.stalls if stall.cause == "data")
        assert own[1 + STALL_CAUSES.index("data")].sum() <= data.steps
    assert head["bin_low_us"] < head["all"]["median"] < head["bin_high_us"]


def test_mean_median_and_percentile_are_of_the_steady_steps(decode):
    step = [100.0] + [10.0] * 98 + [50.0]
    head, _ = decode(encode_run([rank_of(series_of(step, warm_up=1))]).payload)
    assert head["all"]["mean"] == pytest.approx((98 * 10e3 + 50e3) / 99)
    assert head["all"]["median"] == 10e3


@pytest.mark.parametrize("many", [1, 2])
def test_a_job_of_one_step_has_a_section(view, many):
    shown = view(WholeRun(ranks=(rank_of(series_of([30.0] * many, warm_up=many)),)))
    assert shown["summary"] == "The run has no steady steps: it ended during its warm-up."
    assert shown["facts"] == [("Steps", str(many), "")]


def test_without_steps_there_is_no_section(view):
    assert view(None) is None
    assert view(WholeRun(ranks=())) is None
    assert view(WholeRun(ranks=(rank_of(series_of([])),))) is None


def test_the_summary_says_what_stalls_cost(view):
    stall = PlantedStall(cause="data", ms=40.0, period=4)
    run = make_run(2_000, 1, planted=(stall,), slower_from=1, windows=())
    times = run.ranks[0].times
    summary = view(run)["summary"]
    assert f"{times.mean_ms:.1f} ms on average, 36.0 ms without stalls" in summary
    assert summary.endswith("data stalls (every 4th step).")
    healthy = view(make_run(2_000, 1, planted=(), slower_from=1))["summary"]
    assert healthy == "A step takes 36.0 ms on average, without notable stalls. Steps vary by 1.0%."


def test_a_row_of_the_table_is_the_mean_over_all_ranks():
    stall = PlantedStall(cause="gc", ms=90.0, one_in=10)
    slow, calm = (make_run(1_000, 1, planted=planted).ranks[0] for planted in ((stall,), ()))
    (row,) = stall_rows([slow, replace(calm, rank=1)])
    (own,) = slow.stalls
    assert row.cost_ms == pytest.approx(own.cost_ms / 2)
    assert row.ranks == "0"
    assert (row.step, row.series) == (own.numbers[0], 0)
    mean = (slow.times.mean_ms + calm.times.mean_ms) / 2
    assert row.share == pytest.approx(own.cost_ms / 2 / mean, rel=1e-3)


def test_the_costliest_cause_comes_first():
    rows = stall_rows(make_run(20_000, 2).ranks)
    assert [row.cost_ms for row in rows] == sorted((row.cost_ms for row in rows), reverse=True)
    assert rows[0].cause == "data"
    assert {row.cause for row in rows} == {plan.cause for plan in PLANTED}


@pytest.mark.parametrize(
    ("stalled", "period", "words"),
    [
        (2_500, 4, "every 4th step"),
        (100, 21, "every 21st step"),
        (100, 112, "every 112th step"),
        (2_500, None, "1 step in 4"),
        (10_000, None, "every step"),
        (9_000, None, "most steps"),
        (1, None, "1 step"),
        (0, None, "between epochs"),
        (3, None, "1 step in 3,333"),
    ],
)
def test_how_often_a_stall_comes(stalled, period, words):
    assert how_often(stalled, 10_000, period) == words


def account_of(**ms):
    wall = sum(ms.values())
    parts = [AccountPart(id=name, ms=value, share=value / wall) for name, value in ms.items()]
    return RunAccount(wall_ms=wall, goodput=ms["training"] / wall, parts=tuple(parts))


def test_ranks_have_bars_of_their_own_only_where_they_differ_much():
    series = series_of([10.0] * 9)
    usual = account_of(start_up=10.0, training=90.0)
    other = account_of(start_up=10.0, training=80.0, outside=10.0)
    ranks = [rank_of(series, account=usual), rank_of(series, rank=1, account=usual)]
    assert account_bars(ranks) == []
    labels = [bar.label for bar in account_bars([*ranks, rank_of(series, rank=2, account=other)])]
    assert labels == ["rank 0", "rank 1", "rank 2"]


def test_every_cause_and_part_has_words_and_colours():
    assert list(STALLS) == list(STALL_CAUSES)
    assert [name for name in ACCOUNT_PARTS if name in ACCOUNT] == list(ACCOUNT)
    assert set(ACCOUNT_PARTS) == {*ACCOUNT, *WITHOUT_GRADIENTS}
    light, dark = read_page_file("report.css").split(':root[data-theme="dark"] {')
    for cause in STALL_CAUSES:
        assert f"stall_{cause}" in PARTS
        assert f"--c-stall_{cause}:" in light
        assert f"--c-stall_{cause}:" in dark
        assert f".bg-stall_{cause} {{" in dark
        assert f"  {cause}: " in read_page_file("run_shapes.js")
    assert all(f".acc-{name} {{" in read_page_file("run.css") for name in ACCOUNT)


def test_the_section_stands_between_the_verdict_and_the_step(make_trace, explain, report, tmp_path):
    explanation = report(explain(make_trace()))
    write_report(replace(explanation, run=make_run(500, 2)), [], tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    places = [text.index(f'<section id="{name}"') for name in ("verdict", "run", "step")]
    assert places == sorted(places)
    write_report(explanation, [], tmp_path / "bare.html")
    assert 'id="run"' not in (tmp_path / "bare.html").read_text()


def test_names_from_outside_are_escaped(make_trace, explain, report, hostile, tmp_path):
    run = make_run(500, 1)
    rank = replace(run.ranks[0], notes=(hostile,))
    where = tuple(replace(place, file=hostile) for stall in rank.stalls for place in stall.where)
    rank = replace(rank, stalls=tuple(replace(stall, where=where) for stall in rank.stalls))
    explanation = replace(report(explain(make_trace())), run=WholeRun(ranks=(rank,)))
    write_report(explanation, [], tmp_path / "run.html")
    assert "<img" not in (tmp_path / "run.html").read_text()
