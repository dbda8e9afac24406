"""Training through a parameter server, worked out on paper and explained."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

import stepscope
from server_runs import BEGAN_NS, MS, write_run
from stepscope.errors import NotCapturedError, UnreadableInputError, UsageError
from stepscope.explain.findings.parameter_server import barrier_waits, server_bound
from stepscope.explain.job.late_ranks import judge_whole_run
from stepscope.explain.parameter_server import find_straggling, mean_of_slowest, summarise_together
from stepscope.fix.server.membership import (
    LostUpdates,
    MemberChange,
    ShardRestored,
    event_line,
    worker_file,
)
from stepscope.records.folders import COORDINATOR_FILE, SERVER_FOLDER
from stepscope.records.job import WorkerTimes
from stepscope.trace.run_folder.server_events import read_server_events
from stepscope.ui.cli.explain import command as explain_command
from stepscope.ui.cli.whatif import command as whatif_command
from stepscope.ui.topics.explanation_json import explanation_json

from .whole_run.calls import part_of, run_of

# With 2 ms for a pull and 3 ms for a push, own times are 5 ms longer.
PAPER = [[10, 10, 30], [10, 30, 10], [30, 10, 10], [10, 10, 10]]
PERSISTENT = [[60, 20, 20, 20]] * 60


def transient(steps: int = 120, workers: int = 4) -> list[list[float]]:
    slow = np.random.default_rng(3).integers(0, workers, steps)
    return [[60.0 if worker == at else 20.0 for worker in range(workers)] for at in slow.tolist()]


def summary_of(run):
    events = read_server_events([run])
    assert events is not None
    return summarise_together(events)


@pytest.fixture
def paper(tmp_path):
    return write_run(tmp_path / "run", PAPER, mode="bounded", bound=1)


def test_three_workers_on_paper(paper) -> None:
    summary = summary_of(paper)
    assert summary.consistency == "bounded:1"
    assert [worker.whole_ns // MS for worker in summary.workers] == [85, 80, 80]
    assert [worker.blocked_ns // MS for worker in summary.workers] == [5, 0, 0]
    assert summary.blocked_share == pytest.approx(5 / 245)
    assert summary.updates == 12
    assert summary.updates_per_s == pytest.approx(1e3 * (4 / 85 + 4 / 80 + 4 / 80))
    assert summary.barrier_updates_per_s == pytest.approx(3 / 0.030)  # (35 + 35 + 35 + 15) / 4
    assert summary.gain == pytest.approx(1.4706, rel=1e-4)
    assert summary.verdict == "pays"
    assert summary.staleness.counts == (7, 5)
    assert summary.staleness.mean == pytest.approx(5 / 12)
    (pair,) = summary.blocks
    assert (pair.worker, pair.by, pair.blocked_ns, pair.times) == (0, 2, 5 * MS, 1)
    (shard,) = summary.shards
    assert (shard.updates, shard.pulls, shard.busy_ns) == (12, 12, 24 * MS)
    assert shard.busy_share == pytest.approx(24 / 85)
    assert (shard.mean_queue, shard.largest_queue, shard.mean_wait_ms) == (1, 1, 1)
    assert summary.span_s == pytest.approx(0.085)
    first, *_, last = summary.losses
    assert (first.s, first.updates, first.loss) == (pytest.approx(0.015), 1, 1.0)
    assert (last.s, last.updates, last.loss) == (pytest.approx(0.085), 12, 0.25)


@pytest.mark.parametrize(("mode", "bound"), [("strong", 0), ("bounded", 2), ("eventual", None)])
def test_a_workers_parts_add_up(tmp_path, mode, bound) -> None:
    summary = summary_of(write_run(tmp_path, transient(40), mode=mode, bound=bound))
    for worker in summary.workers:
        parts = (worker.blocked_ns, worker.pull_ns, worker.compute_ns, worker.push_ns)
        assert sum(parts) + worker.other_ns == worker.whole_ns
        assert worker.pushed_bytes == worker.pulled_bytes == 40 * 4_000
    assert sum(summary.staleness.counts) == summary.updates == 160


def times_of(*series: list[float], side_by_side: bool = True) -> WorkerTimes:
    return WorkerTimes(
        workers=tuple(range(len(series))),
        own_ns=tuple(np.array(one) * MS for one in series),
        side_by_side=side_by_side,
        source="server",
    )


def test_the_three_bounds_on_paper() -> None:
    found = find_straggling(times_of(*map(list, zip(*PAPER, strict=True))))
    assert (found.barrier_ms, found.slowest_ms, found.free_ms) == (25, 15, pytest.approx(15))
    assert found.kind == "transient"
    found = find_straggling(times_of([30, 30], [10, 10], [10, 10]))
    assert (found.barrier_ms, found.slowest_ms) == (30, 30)
    assert found.free_ms == pytest.approx(3 / (1 / 30 + 2 / 10))
    assert (found.kind, found.worker, found.typical_ratio, found.always) == (
        "persistent",
        0,
        3,
        True,
    )
    assert find_straggling(times_of([10, 11], [11, 10])).kind == "none"


def test_the_same_worker_now_and_then_is_persistent() -> None:
    """A bound does not help: in the long run nobody is faster than that worker's mean."""
    found = find_straggling(times_of([10, 10, 10, 50], [10] * 4, [10] * 4))
    assert (found.kind, found.worker, found.always) == ("persistent", 0, False)
    assert found.barrier_ms == found.slowest_ms == 20


def test_independent_steps_meet_by_chance() -> None:
    assert mean_of_slowest(times_of([1, 3], [2], side_by_side=False)) == pytest.approx(2.5 * MS)


def test_own_times_of_a_synchronous_run_are_steps_without_waits() -> None:
    late = [np.zeros(100), np.full(100, 6.0 * MS), np.zeros(100)]
    steps = {"step_ns": np.full(100, 30 * MS)}
    parts = [
        part_of(rank, replace(run_of(one), **steps), host="one") for rank, one in enumerate(late)
    ]
    own = judge_whole_run(parts).own_times
    assert own is not None
    assert own.side_by_side
    assert [float(np.median(series)) / MS for series in own.own_ns] == [24, 30, 24]


# What explain says by itself


def test_a_bound_pays_with_transient_stragglers(tmp_path) -> None:
    explanation = stepscope.explain(write_run(tmp_path / "r", transient(), mode="bounded", bound=3))
    assert explanation.verdict.startswith("Parameter server: bounded:3 pays")
    assert "Slow steps come to different workers" in explanation.why
    assert "staleness-does-not-pay" not in {finding.id for finding in explanation.findings}


def test_a_bound_does_not_pay_with_a_persistent_straggler(tmp_path) -> None:
    run = write_run(tmp_path / "r", PERSISTENT, mode="bounded", bound=3)
    explanation = stepscope.explain(run)
    assert explanation.findings[0].id == "staleness-does-not-pay"
    assert "Worker 0 is slow at every step: it takes 2.6 times" in explanation.verdict
    assert "Bounded staleness only delays the wait" in explanation.verdict
    assert explanation.findings[0].evidence[-1] == "waited for: worker 0 (100%)"


@pytest.mark.parametrize(
    ("own", "remedy", "words"),
    [
        (transient(), "bounded-staleness", "would wait less"),
        (PERSISTENT, "no-straggler", "would only delay the wait"),
    ],
)
def test_a_barrier_says_whether_a_bound_would_help(tmp_path, own, remedy, words) -> None:
    explanation = stepscope.explain(write_run(tmp_path / "r", own))
    (finding,) = [one for one in explanation.findings if one.id == "barrier-waits"]
    assert finding.remedies[0].id == remedy
    assert words in finding.summary


def test_equal_workers_need_no_staleness(tmp_path) -> None:
    run = write_run(tmp_path / "r", [[20, 20, 20]] * 30, mode="eventual", bound=None)
    summary = summary_of(run)
    assert summary.verdict == "does not pay"
    assert "Workers take equally long" in summary.why
    run = write_run(tmp_path / "s", [[20, 20, 20]] * 30)
    assert "barrier-waits" not in {finding.id for finding in stepscope.explain(run).findings}


def test_a_busy_shard_is_a_finding(paper) -> None:
    summary = summary_of(paper)
    assert server_bound.find(summary) is None  # busy for 28%
    busy = replace(summary.shards[0], busy_share=0.9, mean_queue=2.5, mean_wait_ms=4.0)
    finding = server_bound.find(replace(summary, shards=(busy,)))
    assert finding is not None
    assert finding.id == "server-bound"
    assert finding.share == pytest.approx(12 * 5 / 245)  # pulls and pushes
    assert "busy for 90% of the run" in finding.summary


def test_one_worker_waits_for_nobody(tmp_path) -> None:
    run = write_run(tmp_path / "r", [[10]] * 8)
    summary = summary_of(run)
    assert (summary.verdict, summary.barrier_updates_per_s, summary.straggling) == (
        "one worker",
        None,
        None,
    )
    with pytest.raises(NotCapturedError, match="one worker, which waits for nobody"):
        stepscope.whatif(run, consistency="bounded:3")


# Files as they come


def test_a_killed_worker_leaves_half_a_line(paper) -> None:
    file = paper / SERVER_FOLDER / worker_file(1, 0)
    whole = summary_of(paper)
    with file.open("a") as lines:
        lines.write('{"event":"pull","wor')
    assert summary_of(paper) == whole


def test_lines_that_no_server_writes_are_left_out_and_counted(paper) -> None:
    file = paper / SERVER_FOLDER / worker_file(1, 0)
    whole = summary_of(paper)
    odd = ['{"event":"push","worker":1,"clock":-7}', "[]", '{"event":"pull","worker":"x"}', "\x00"]
    file.write_text("\n".join([*odd, file.read_text()]))
    (note,) = summary_of(paper).notes
    assert note.id == "server-lines"
    assert "4 lines of 12 left out" in note.detail
    assert summary_of(paper).workers == whole.workers


def test_a_diverged_loss_keeps_its_step(paper) -> None:
    file = paper / SERVER_FOLDER / worker_file(1, 0)
    file.write_text(file.read_text().replace('"loss":0.5', '"loss":NaN'))
    summary = summary_of(paper)
    assert summary.updates == 12
    assert len(summary.losses) == 11
    assert summary.notes == ()


def test_deaths_and_restored_shards_are_told(paper) -> None:
    common = {"at_unix_ns": BEGAN_NS}
    evicted = MemberChange(change="evicted", worker=2, life=0, clock=4, **common)
    lost = (LostUpdates(member="0.0", first=2, last=3),)
    restored = ShardRestored(shard=0, epoch=2, source="checkpoint", lost=lost, took_ns=MS, **common)
    (paper / SERVER_FOLDER / COORDINATOR_FILE).write_text(
        event_line(evicted) + event_line(restored)
    )
    summary = summary_of(paper)
    assert (summary.evicted, summary.restored, summary.lost_updates) == ((2,), (0,), 2)


@pytest.mark.parametrize("content", ["", "[]", '{"mode":"sometimes"}', '{"mode":7}'])
def test_a_server_that_is_not_described_is_unreadable(paper, content) -> None:
    (paper / SERVER_FOLDER / "server.json").write_text(content)
    with pytest.raises(UnreadableInputError, match=r"server\.json"):
        stepscope.explain(paper)


def test_a_server_without_a_finished_step_is_not_captured(paper) -> None:
    for file in (paper / SERVER_FOLDER).glob("*.jsonl"):
        file.unlink()
    with pytest.raises(NotCapturedError, match="no worker finished a step"):
        stepscope.explain(paper)


# Surfaces


def test_json_has_the_section_and_null_for_what_is_not_known(paper) -> None:
    answer = json.loads(json.dumps(explanation_json(stepscope.explain(paper))))
    together = answer["together"]
    assert together["gain"] == pytest.approx(1.4706, rel=1e-4)
    assert together["staleness"] == {
        "pulls": 12,
        "mean": pytest.approx(5 / 12),
        "largest": 1,
        "counts": [7, 5],
    }
    assert together["straggling"]["kind"] == "transient"
    assert answer["budget"]["step_ms"] is None
    assert answer["ranks"][0]["timeline_ns"]["span"] is None


def test_terminal_and_report_show_it(paper, tmp_path) -> None:
    page = tmp_path / "page.html"
    for options in ([], ["--full"], ["--html", str(page)]):
        done = CliRunner().invoke(explain_command, [str(paper), *options], standalone_mode=False)
        assert done.exception is None
        assert "147 updates/s with bounded:1, 100 with a barrier at every step" in done.output
    html = page.read_text()
    assert "Who waits for whom" in html
    assert "worker 2" in html


def test_a_server_lies_next_to_the_traces_of_its_ranks(golden, tmp_path) -> None:
    """The traces are explained as ever, and the section comes with them."""
    import shutil

    run = tmp_path / "run"
    shutil.copytree(golden / "cpu-two-ranks", run)
    alone = stepscope.explain(run)
    write_run(run, transient(40, 2), mode="bounded", bound=2)
    both = stepscope.explain(run)
    assert both.together is not None
    assert [rank.timeline for rank in both.ranks] == [rank.timeline for rank in alone.ranks]


# What-ifs of a server's run


def test_another_consistency_is_promised_from_the_workers_own_times(tmp_path) -> None:
    """Promised from the strong run; then the same workers run bounded."""
    strong = write_run(tmp_path / "strong", transient(300))
    bounded = summary_of(write_run(tmp_path / "b", transient(300), mode="bounded", bound=3))
    prediction = stepscope.whatif(strong, consistency="bounded:3")
    promise = prediction.consistency
    assert promise.updates_per_s == pytest.approx(bounded.updates_per_s, rel=0.1)
    assert promise.low < bounded.updates_per_s < promise.high
    assert prediction.speedup == pytest.approx(prediction.throughput_factor)
    same = stepscope.whatif(strong, consistency="strong")
    assert same.predicted_ms == pytest.approx(same.baseline_ms)


def test_whatif_lists_the_usual_ones_and_takes_nothing_else(tmp_path) -> None:
    run = write_run(tmp_path / "r", PERSISTENT)
    done = CliRunner().invoke(whatif_command, [str(run), "--json"], standalone_mode=False)
    assert done.exception is None
    tried = {one["settings"][0]: one["speedup"] for one in json.loads(done.output)["tried"]}
    assert tried["consistency=eventual"] > 2
    assert tried["consistency=bounded:10"] == pytest.approx(1.0, abs=0.02)
    done = CliRunner().invoke(whatif_command, [str(run)], standalone_mode=False)
    assert "one change at a time" in done.output
    with pytest.raises(UsageError, match="Only its consistency can be changed"):
        stepscope.whatif(run, "precision=bf16")


def test_asking_for_permission_is_no_waiting_for_others(tmp_path) -> None:
    """Without a bound nobody is waited for, however long an answer takes."""
    summary = summary_of(write_run(tmp_path / "r", transient(), mode="eventual", bound=None))
    assert barrier_waits.find(replace(summary, blocked_share=0.2)) is None
    bounded = replace(summary, blocked_share=0.2, consistency="bounded:3")
    assert barrier_waits.find(bounded) is not None
