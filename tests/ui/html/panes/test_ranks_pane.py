"""The page about several ranks: its numbers are the job's, and what is left out is said."""

from __future__ import annotations

import re

import numpy as np
import pytest
from msgspec.structs import replace

from jobs import Fault, Plan, draw_plan, make_job, profile_of
from stepscope.explain.job.all_ranks import join_ranks
from stepscope.records.job import Straggler, Stragglers
from stepscope.records.rank_facts import NetworkPlace
from stepscope.ui.html import report as report_module
from stepscope.ui.html.panes import ranks as ranks_pane
from stepscope.ui.html.panes.ranks import draw_arrivals, draw_bandwidth, ranks_view
from stepscope.ui.html.panes.tables import job_tables
from stepscope.ui.html.report import ranks_in_detail, write_report

SLOW = Fault(cause="compute", size=1.4, place=2)


def joined(ranks=4, **plan):
    made = make_job(Plan(**{"ranks": ranks, "steps": 6, "rounds": 20, "fault": SLOW, **plan}))
    return join_ranks(made.parts, [profile_of(made.plan)])


@pytest.fixture(scope="module")
def job():
    return joined()


@pytest.fixture(scope="module")
def apart():
    """Clocks of which one was set in mid-window."""
    return joined(jump=(1, 5e8), fault=None)


def test_the_matrices_survive_the_round_trip(job, decode):
    missing = job.step_ns.copy()
    missing[1, 2] = -1
    head, columns = decode(ranks_view(replace(job, step_ns=missing), ())["payload"])
    assert head["ranks"] == [0, 1, 2, 3]
    assert head["steps"] == list(job.steps)
    step, comm = (columns[name].reshape(4, -1).T - 1 for name in ("step", "comm"))
    assert np.array_equal(step, missing)
    assert np.array_equal(comm, job.exposed_comm_ns)
    assert head["stragglers"] == [[2, "slow compute"]]


def test_lanes_and_path_are_on_one_clock_that_begins_at_zero(job, decode):
    head, columns = decode(ranks_view(job, ())["payload"])
    lanes = job.lanes
    zero = int(lanes.end_ns[0]) - int(columns["lane_end"][0])
    assert (columns["lane_arrival"] + zero == lanes.arrival_ns).all()
    assert (columns["lane_end"] + zero == lanes.end_ns).all()
    starts = [*columns["lane_arrival"].tolist(), *(step[2] for step in head["lanes"]["steps"])]
    assert min(*starts, head["path"]["start"]) == 0
    assert columns["path_start"].tolist()[1:] == columns["path_end"].tolist()[:-1]
    assert head["lanes"]["span"] >= columns["lane_end"].max()


def test_the_last_arrival_of_drawn_groups_is_the_last_of_their_ranks(job, decode):
    _, columns = decode(ranks_view(job, ())["payload"])
    for match in range(len(columns["last"])):
        mine = columns["lane_match"] == match
        assert columns["last"][match] == columns["lane_arrival"][mine].max()


def test_a_wait_for_a_rank_that_is_not_drawn_ends_when_it_came(decode):
    job = joined(64, form="tensor", fault=Fault(cause="compute", size=1.5, place=40))
    lanes = job.lanes
    drawn = np.isin(lanes.rank, [rank for rank in lanes.ranks if rank != 40])
    names = "match", "rank", "kind", "size_bytes", "arrival_ns", "last_ns", "start_ns", "end_ns"
    kept = {name: getattr(lanes, name)[drawn] for name in names}
    head, without = decode(ranks_view(replace(job, lanes=replace(lanes, **kept)), ())["payload"])
    latest = np.zeros(len(without["last"]), np.int64)
    np.maximum.at(latest, without["lane_match"], without["lane_arrival"])
    assert (without["last"] >= latest).all()
    assert (without["last"] > latest).any()
    assert head["lanes"]["ranks"] == list(lanes.ranks)


def test_ranks_without_a_trace_count_as_ranks_of_the_job(job):
    many = len(job.ranks)
    label, value, where = ranks_view(job, (), untraced=192)["facts"][0]
    assert (label, value) == ("Ranks", f"{many + 192}")
    assert where.startswith(f"{many} of them traced")
    assert ranks_view(job, ())["facts"][0][1] == f"{many}"


def test_the_verdict_comes_first_and_every_state_has_its_sentence(job, apart):
    view = ranks_view(job, ())
    assert view["verdict"].startswith("Rank 2 holds the others back: its own work takes 1.")
    assert view["tone"] == "bad"
    assert re.match(r"Clocks are aligned within ±\d", view["clock"])
    assert [view["no_lanes"], view["no_path"], view["no_arrivals"], view["no_bandwidth"]] == [
        ""
    ] * 4
    view = ranks_view(apart, ())
    assert view["tone"] == "good"
    assert "contradict each other" in view["no_lanes"]
    assert view["no_path"].startswith("The critical path is not known")
    assert "not aligned" in view["no_arrivals"]
    assert view["clock"].startswith("Clocks are not aligned")
    alone = join_ranks(make_job(Plan(ranks=2, steps=1)).parts)
    assert "is not known" in ranks_view(alone, ())["verdict"]


def test_ranks_that_share_nothing_leave_sentences(decode):
    parts = make_job(Plan(ranks=2, steps=3)).parts
    none = {
        name: getattr(parts[0].calls, name)[:0]
        for name in parts[0].calls.__struct_fields__
        if name != "groups"
    }
    parts = [replace(part, calls=replace(part.calls, **none)) for part in parts]
    view = ranks_view(join_ranks(parts), ())
    assert view["no_bandwidth"] == "No collective was recorded by two ranks of its group."
    assert view["no_lanes"]
    head, _ = decode(view["payload"])
    assert "lanes" not in head


def test_steps_beyond_what_fits_are_left_out_and_said(job, decode, monkeypatch):
    monkeypatch.setattr(ranks_pane, "MOST_CELLS", 12)
    view = ranks_view(job, ())
    assert view["steps_left_out"] == "3 of 6 steps are shown, one in 2."
    assert len(decode(view["payload"])[0]["steps"]) == 3


def test_of_too_many_ranks_the_telling_ones_are_told(together, monkeypatch):
    monkeypatch.setattr(report_module, "MOST_RANKS", 12)
    job = joined(64, fault=Fault(cause="compute", size=1.4, place=40))
    told = ranks_in_detail(together(job), {"/runs/3.json"})
    numbers = [rank.rank for rank in told]
    assert len(numbers) == 12
    assert numbers == sorted(numbers)
    assert {3, 40} <= set(numbers)


def test_a_report_of_a_thousand_ranks_stays_small(together, tmp_path):
    made = make_job(draw_plan(3, 1024, faulty=True, steps=20))
    write_report(together(join_ranks(made.parts)), [], tmp_path / "r.html")
    assert (tmp_path / "r.html").stat().st_size < 4_000_000


def test_notes_about_all_ranks_are_told_once(job, together, tmp_path):
    said = together(joined(offset_ns=5e9))
    assert [note.id for note in said.quality] == ["clocks-apart"]
    write_report(said, [], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert text.count("clocks-apart") == 1


def test_bars_are_as_long_as_ranks_are_late(job):
    svg, left_out = draw_arrivals(job)
    found = re.findall(r"rank (\d+): last to arrive in ([\d,]+) of", svg)
    assert [int(rank) for rank, _ in found] == [row.rank for row in job.arrivals]
    widths = [float(w) for w in re.findall(r'bar-last"[^>]*width="([\d.]+)"', svg)]
    assert widths[0] == max(widths)
    assert "is-accused" in svg
    assert left_out == ""


def test_many_ranks_get_few_bars_and_a_sentence():
    job = joined(64, fault=Fault(cause="compute", size=1.4, place=40))
    svg, left_out = draw_arrivals(job)
    assert svg.count('class="who"') == 12
    assert left_out.startswith("The other 52 ranks were ")


def test_bandwidth_has_a_dot_a_size_and_the_calibrated_line(job):
    svg, series = draw_bandwidth(job)
    assert len(re.findall(r'class="dot', svg)) == len(job.collectives)
    assert svg.count('class="expected"') == len(series)
    bare = tuple(replace(row, expected_ns=None) for row in job.collectives)
    assert 'class="expected"' not in draw_bandwidth(replace(job, collectives=bare))[0]


def test_names_of_groups_are_escaped(job, hostile):
    rows = tuple(replace(row, group=hostile, description=hostile) for row in job.collectives)
    svg, _ = draw_bandwidth(replace(job, collectives=rows))
    assert "<img" not in svg


def test_a_slow_link_is_ringed():
    made = make_job(draw_plan(5, 16, cause="link"))
    job = join_ranks(made.parts, [profile_of(made.plan)])
    (straggler,) = job.stragglers.ranks
    assert f"group {straggler.group}: slow link" in draw_bandwidth(job)[0]


def test_every_row_of_the_tables_has_its_cells(job, apart):
    assert all(table["rows"] for table in job_tables(job))
    for each in (job, apart):
        for table in job_tables(each):
            assert all(len(row) == len(table["columns"]) for row in table["rows"])
    absent = {table["id"]: table["absent"] for table in job_tables(apart)}
    assert absent["job-clocks"] == "not aligned"


def test_ranks_of_several_hosts_lie_under_them(job, decode):
    """Hosts in the order of their first ranks; a slow host is marked with all of its ranks."""
    hosts = {0: "b", 1: "b", 2: "a", 3: "a"}
    slow = Straggler(
        rank=None, cause="compute", slowdown=1.4, cost_ms=3, steps=5, of=6, scope="host", host="a",
        ranks=(2, 3),
    )  # fmt: skip
    found = Stragglers(verdict="found", ranks=(slow,))
    places = {"a": NetworkPlace(rack="B2", switch="leaf7"), "b": NetworkPlace()}
    spread = replace(job, hosts=hosts, stragglers=found, places=places)
    view = ranks_view(spread, ())
    head, _ = decode(view["payload"])
    assert view["several_hosts"]
    assert head["hosts"] == ["b", "a"]
    assert head["host"] == [0, 0, 1, 1]
    assert head["places"] == ["", "rack B2, switch leaf7"]
    assert head["stragglers"] == [[2, "slow compute"], [3, "slow compute"]]
    assert head["slowHosts"] == [[1, "slow compute"]]
    assert not ranks_view(replace(job, hosts=dict.fromkeys(range(4), "b")), ())["several_hosts"]


def test_tables_name_hosts_and_the_reach_of_collectives(job):
    hosts = {0: "b", 1: "b", 2: "a", 3: "a"}
    rows = tuple(replace(row, reach="between hosts", slowest_rank=2) for row in job.collectives)
    tables = {t["id"]: t for t in job_tables(replace(job, hosts=hosts, collectives=rows))}
    table = tables["job-collectives"]
    assert table["rows"][0][2] == "between hosts"
    assert table["rows"][0][-1] == "rank 2 on a"
