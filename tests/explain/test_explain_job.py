"""A job explained from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope import NotCapturedError, UnreadableInputError, UsageError
from stepscope.explain.explain_job import JobTraces, SeveralJobsError, explain_job
from stepscope.explain.verdict import put_cause_first, state
from stepscope.records.explanation import Explanation, Finding

from .build import Events, frame, kernel, step, write

# Several files, one verdict.


def training(*, idle: float = 0, name: str = "gemm") -> tuple[Events, ...]:
    """Two steps of 100 µs compute; the host lets the device wait `idle` µs in each."""
    cycle = 100 + idle
    return (
        step(1, start=-10, dur=cycle),
        step(2, start=cycle - 10, dur=cycle),
        kernel(name, start=0, dur=100, launched_at=-5),
        kernel(name, start=cycle, dur=100, launched_at=cycle - 5),
    )


def ids(explanation: Explanation) -> set[str]:
    return {note.id for note in explanation.quality}


def test_ranks_come_in_order_whatever_the_files_are_called(tmp_path: Path) -> None:
    write(tmp_path / "a.json", *training(), rank=1, world_size=2)
    write(tmp_path / "b.json", *training(), rank=0, world_size=2)
    found = explain_job(tmp_path)
    assert [(rank.rank, rank.path[-6:]) for rank in found.ranks] == [(0, "b.json"), (1, "a.json")]
    assert ids(found) == set()


def test_the_gravest_rank_gives_the_verdict(tmp_path: Path) -> None:
    write(tmp_path / "a.json", *training(), rank=0, world_size=2)
    write(tmp_path / "b.json", *training(idle=100), rank=1, world_size=2)
    found = explain_job(tmp_path)
    assert found.findings[0].id == "host-bound"
    assert found.findings[0].rank == 1
    assert found.verdict.startswith("Host-bound (rank 1): ")
    assert "healthy" not in {finding.id for finding in found.findings}
    assert found.budget.step_ms == 0.2  # the slower rank's step


def test_of_one_finding_on_several_ranks_the_gravest_is_shown(tmp_path: Path) -> None:
    for rank, idle in enumerate((100, 300, 200)):
        write(tmp_path / f"{rank}.json", *training(idle=idle), rank=rank, world_size=3)
    (found,) = (f for f in explain_job(tmp_path).findings if f.id == "host-bound")
    assert (found.rank, found.share) == (1, 0.75)


def test_one_file_names_no_rank_in_the_verdict(tmp_path: Path) -> None:
    found = explain_job(write(tmp_path / "a.json", *training(idle=100), rank=3, world_size=4))
    assert found.verdict.startswith("Host-bound: ")
    assert found.ranks[0].rank == 3


def test_a_healthy_run_is_an_answer(tmp_path: Path) -> None:
    found = explain_job(write(tmp_path / "a.json", *training(name="softmax")))
    assert found.findings[0].id == "healthy"
    assert found.verdict.startswith("Healthy: ")
    assert found.next


def test_a_job_is_not_healthy_while_one_ranks_work_is_not_known(tmp_path: Path) -> None:
    for rank, name in enumerate(("softmax", "gemm")):
        events = training(name=name)
        write(tmp_path / f"{rank}.json", *events, rank=rank, world_size=2)
    found = explain_job(tmp_path)
    assert found.findings[0].id == "unknown-work"
    assert "healthy" not in {finding.id for finding in found.findings}
    assert found.verdict.startswith("Unknown work")
    assert found.next


def communicating(*, idle: float) -> tuple[Events, ...]:
    """Three steps of 200 µs: 100 µs compute, `idle` µs of the host's, the rest in NCCL."""
    out: list[Events] = []
    for n in range(3):
        at = 200 * n
        called = at + 100 + idle - 1 if idle else at - 9
        out += [
            step(n, start=at - 10, dur=200),
            kernel("gemm", start=at, dur=100, launched_at=at - 10),
            kernel(
                "ncclDevKernel_AllReduce",
                start=at + 100 + idle,
                dur=100 - idle,
                stream=20,
                launched_at=called,
            ),
        ]
    return tuple(out)


def test_the_rank_that_others_wait_for_gives_the_verdict(tmp_path: Path) -> None:
    """Rank 0 spends 50% in NCCL, but only because rank 1 comes 90 µs late."""
    write(tmp_path / "a.json", *communicating(idle=0), rank=0, world_size=2)
    write(tmp_path / "b.json", *communicating(idle=90), rank=1, world_size=2)
    found = explain_job(tmp_path)
    assert [(f.id, f.rank) for f in found.findings[:2]] == [
        ("straggler", 1),
        ("exposed-communication", 0),
    ]
    assert "(rank 1): Rank 1 takes" in found.verdict


@pytest.mark.parametrize(
    ("share", "severity", "leads"),
    [(0.08, "low", False), (0.30, "high", True), (0.24, "medium", True)],
    ids=["little of it", "as grave", "half of it"],
)
def test_severity_orders_the_headline_unless_the_cause_explains_half_of_the_symptom(
    share: float, severity: Any, leads: bool
) -> None:
    plain = {"title": "", "summary": "", "evidence": ()}
    symptom = Finding(id="exposed-communication", share=0.47, severity="high", **plain)
    straggler = Finding(id="straggler", share=share, severity=severity, **plain)
    found = put_cause_first([symptom, straggler])
    assert (found[0].id == "straggler") == leads
    assert found[0].severity == "high"  # what leads is as severe as what it causes


def test_communication_that_all_ranks_wait_in_leads_itself(tmp_path: Path) -> None:
    for rank in (0, 1):
        events = communicating(idle=30)
        write(tmp_path / f"{rank}.json", *events, rank=rank, world_size=2)
    assert explain_job(tmp_path).findings[0].id == "exposed-communication"


def test_missing_ranks_are_told(tmp_path: Path) -> None:
    for rank in (0, 3):
        write(tmp_path / f"{rank}.json", *training(), rank=rank, world_size=4)
    found = explain_job(tmp_path)
    assert ids(found) == {"missing-ranks"}
    assert "2 of 4" in found.quality[0].detail


def test_two_files_of_one_rank_are_two_jobs(tmp_path: Path) -> None:
    for name, idle in (("a", 0), ("b", 400)):
        write(tmp_path / f"{name}.json", *training(idle=idle), rank=1, world_size=2)
    with pytest.raises(
        SeveralJobsError, match=r"2 traces are not .*says it is rank 1.*compare A B"
    ):
        explain_job(tmp_path)


def test_files_of_different_jobs_are_explained_apart(tmp_path: Path) -> None:
    for name, rank, world in (("a", 0, 2), ("b", 1, 8), ("c", 1, 2)):
        write(tmp_path / f"{name}.json", *training(idle=rank * 100), rank=rank, world_size=world)
    with pytest.raises(SeveralJobsError, match=r"jobs of 2 and of 8 ranks") as caught:
        explain_job(tmp_path)
    ranks = [[rank.path[-6:] for rank in job.ranks] for job in caught.value.jobs]
    assert ranks == [["a.json", "c.json"], ["b.json"]]
    assert all("traggler" not in job.verdict for job in caught.value.jobs)


def test_traces_that_say_nothing_are_one_job_only_at_the_same_time(tmp_path: Path) -> None:
    write(tmp_path / "x.json", *training())
    write(tmp_path / "y.json", *training(idle=10))
    assert len(explain_job(tmp_path).ranks) == 2
    later = (step(1, start=9_990, dur=100), kernel("k", start=10_000, dur=90, launched_at=9_995))
    write(tmp_path / "z.json", *later)
    with pytest.raises(SeveralJobsError, match="apart"):
        explain_job(tmp_path)


def test_a_copy_and_a_cut_copy_count_once(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.json", *training(), rank=0, world_size=1)
    write(tmp_path / "again.json", *training(), rank=0, world_size=1)
    write(tmp_path / "cut.json", *training()[:3], rank=0, world_size=1)
    found = explain_job(tmp_path)
    assert len(found.ranks) == 1
    assert found.ranks[0].events == explain_job(whole).ranks[0].events
    (note,) = found.quality
    assert note.id == "same-part-twice"
    assert note.count == 2
    assert "cut.json is a cut copy of" in note.detail


def test_files_without_a_rank_take_it_from_their_name_or_place(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for rank in (4, 2):
        folder = run / f"rank-{rank:05}"
        folder.mkdir(parents=True)
        write(folder / "trace.json", *training())
    assert [rank.rank for rank in explain_job(run).ranks] == [2, 4]
    named = tmp_path / "named"
    named.mkdir()
    for name in ("trace_rank7", "trace_rank5"):
        write(named / f"{name}.json", *training())
    assert [rank.rank for rank in explain_job(named).ranks] == [5, 7]
    plain = tmp_path / "plain"
    plain.mkdir()
    for idle, name in enumerate(("x", "y")):
        write(plain / f"{name}.json", *training(idle=idle))
    assert [(rank.rank, rank.path[-6:]) for rank in explain_job(plain).ranks] == [
        (0, "x.json"),
        (1, "y.json"),
    ]


def test_one_bad_file_in_a_folder_is_left_out_and_told(tmp_path: Path) -> None:
    write(tmp_path / "good.json", *training(), rank=0, world_size=1)
    (tmp_path / "bad.json").write_text("not a trace")
    found = explain_job(tmp_path)
    assert [rank.rank for rank in found.ranks] == [0]
    (left_out,) = found.quality
    assert left_out.id == "left-out"
    assert "bad.json" in left_out.detail


def test_a_bad_file_that_was_named_is_an_error(tmp_path: Path) -> None:
    good = write(tmp_path / "good.json", *training())
    bad = tmp_path / "bad.json"
    bad.write_text("not a trace")
    with pytest.raises(UnreadableInputError, match=r"bad\.json"):
        explain_job(good, bad)


def test_a_folder_of_bad_files_only_is_an_error(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text("not a trace")
    with pytest.raises(UnreadableInputError, match=r"a\.json"):
        explain_job(tmp_path)


def test_hosts_of_a_run_without_traces_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / "hosts").mkdir()
    for name in ("run.json", "hosts/00000.json"):
        (tmp_path / name).write_text('{"schema": 1, "status": "finished", "exit_code": 1}')
    with pytest.raises(NotCapturedError, match="holds no trace"):
        explain_job(tmp_path)


def test_a_folder_without_traces_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UnreadableInputError, match="holds no trace"):
        explain_job(tmp_path)


def test_nothing_to_explain_is_wrong_use() -> None:
    with pytest.raises(UsageError):
        explain_job()


def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInputError, match="does not exist"):
        explain_job(tmp_path / "nowhere")


def test_a_trace_without_any_work_has_a_verdict(tmp_path: Path) -> None:
    found = explain_job(
        write(tmp_path / "a.json", frame("train.py(1): main", start=0, dur=5), device=None)
    )
    assert found.verdict
    assert "no-work" in {note.id for note in found.ranks[0].quality}


def test_results_of_visits_come_in_the_order_of_ranks(tmp_path: Path) -> None:
    write(tmp_path / "a.json", *training(), rank=1, world_size=2)
    write(tmp_path / "b.json", *training(), rank=0, world_size=2)
    found, results = JobTraces([tmp_path]).explain(_rank_and_events)
    assert results == [(0, 6), (1, 6)]
    assert [rank.rank for rank in found.ranks] == [0, 1]


def _rank_and_events(analysis, rank):  # type: ignore[no-untyped-def]
    return analysis.trace.rank, rank.events


def test_a_rank_can_be_visited_again_by_its_path(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / f"{number}.json", *training(), rank=number, world_size=2)
    traces = JobTraces([tmp_path])
    explanation, _ = traces.explain()
    rank, results = traces.visit_here(explanation.ranks[1].path, _rank_and_events)
    assert (rank.rank, results) == (1, ((1, 6),))
    (tmp_path / "1.json").unlink()
    assert traces.visit(explanation.ranks, _rank_and_events) == [(0, 6)]
    with pytest.raises(UnreadableInputError):
        traces.visit_here(explanation.ranks[1].path, _rank_and_events)


def test_paths_that_have_gone_can_be_skipped(tmp_path: Path) -> None:
    here = write(tmp_path / "a.json", *training())
    traces = JobTraces([here, tmp_path / "gone.json"], skip_missing=True)
    assert traces.files == [here]


# The first sentence of an answer: the title where the summary lacks it, and whose step it is.


def finding(title: str, summary: str) -> Finding:
    return Finding(id="x", title=title, share=0.5, severity="high", summary=summary, evidence=())


@pytest.mark.parametrize(
    ("title", "summary", "whose", "verdict"),
    [
        (
            "Host-bound",
            "The GPU is idle 72% of the step.",
            "",
            "Host-bound: The GPU is idle 72% of the step.",
        ),
        (
            "FP32 matmuls",
            "FP32 matmuls take 86% of the step.",
            "",
            "FP32 matmuls take 86% of the step.",
        ),
        (
            "Cores in use",
            "It waits in 14% of steps because cores are busy.",
            "",
            "Cores in use: It waits in 14% of steps because cores are busy.",
        ),
        (
            "Slow rank",
            "Rank 1 takes twice as long.",
            "rank 1",
            "Slow rank (rank 1): Rank 1 takes twice as long.",
        ),
        (
            "FP32 matmuls",
            "FP32 matmuls take 86% of rank 1's step.",
            "rank 1",
            "FP32 matmuls take 86% of rank 1's step.",
        ),
    ],
)
def test_a_summary_that_says_its_title_stands_alone(
    title: str, summary: str, whose: str, verdict: str
) -> None:
    assert state(finding(title, summary), whose) == verdict
