"""Ranks that exchange nothing: said where it is known, in other words where memory is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from jobs import Plan, make_job
from jobs_files import write_job
from stepscope.explain.explain_job import explain_job
from stepscope.explain.findings.evidence import JobEvidence
from stepscope.explain.findings.jobs import not_training_together
from stepscope.explain.job.all_ranks import join_ranks
from stepscope.explain.job.rank_part import exchanges_gradients
from stepscope.records.explanation import Finding
from stepscope.records.job import Membership
from stepscope.ui.topics.explanation_json import explanation_json

ALONE = Membership(
    pid=11, world_size=2, steps=40, groups=0, joined=False, trained_bytes=547_000, shared=False,
    exchanged_bytes=0, calls_before=0,
)  # fmt: skip


def member(**changes: Any) -> Membership:
    return msgspec.structs.replace(ALONE, **changes)


def found(*members: Membership | None) -> Finding | None:
    """Of a made job whose ranks have these memberships."""
    parts = make_job(Plan(ranks=len(members), steps=3)).parts
    parts = [
        msgspec.structs.replace(part, member=each)
        for part, each in zip(parts, members, strict=True)
    ]
    return not_training_together.find(JobEvidence(join_ranks(parts), ()))


def test_ranks_that_exchange_nothing_do_not_train_together() -> None:
    finding = found(member(), member(pid=12))
    assert finding is not None
    assert (finding.id, finding.severity, finding.share) == ("not-training-together", "high", 0.5)
    assert finding.of == "work"
    assert "each trains its own model." in finding.summary
    assert finding.evidence[0] == "a step exchanges 0 B, but 547 kB of parameters are trained"
    assert finding.remedies[0].id == "wrap-model"


def test_a_loss_that_is_summed_is_no_exchange_of_gradients() -> None:
    sums_a_loss = member(exchanged_bytes=4, calls_before=40)
    finding = found(sums_a_loss, sums_a_loss)
    assert finding is not None
    assert finding.severity == "high"


@pytest.mark.parametrize(
    "other",
    [
        member(joined=True),
        member(exchanged_bytes=547_000),
        member(exchanged_bytes=None),
        member(exchanged_bytes=4, trained_bytes=None),
        member(steps=0),
        None,
    ],
    ids=["DDP", "by hand", "sizes unknown", "trained bytes unknown", "trains not", "bare trace"],
)
def test_nothing_is_said_where_a_rank_exchanges_or_nobody_knows(other: Membership | None) -> None:
    assert found(member(), other) is None


def test_one_percent_of_the_trained_bytes_is_the_limit() -> None:
    assert exchanges_gradients(member(exchanged_bytes=5_469)) is False
    assert exchanges_gradients(member(exchanged_bytes=5_470)) is True


def test_calls_outside_the_recorded_steps_leave_a_doubt() -> None:
    finding = found(member(calls_before=6), member(calls_before=6))
    assert finding is not None
    assert finding.severity == "medium"
    assert finding.summary.endswith("unless models are averaged in other steps.")


@pytest.mark.parametrize(
    ("shared", "severity", "words"),
    [
        (True, "none", "2 processes train one model in shared memory"),
        (False, "low", "They share no parameters"),
        (None, "low", "Whether they share parameters is not known"),
    ],
)
def test_processes_without_a_group_are_told_in_other_words(
    shared: bool | None, severity: str, words: str
) -> None:
    process = member(world_size=1, shared=shared)
    finding = found(process, process)
    assert finding is not None
    assert (finding.severity, words in finding.summary) == (severity, True)
    assert "do not train together" not in finding.summary


def test_who_exchanges_nothing_holds_nobody_back() -> None:
    parts = make_job(Plan(ranks=2, steps=6)).parts
    slow = parts[1].pace
    slow = msgspec.structs.replace(slow, dur_ns=slow.dur_ns * 2)
    parts = [msgspec.structs.replace(part, member=ALONE) for part in parts]
    parts[1] = msgspec.structs.replace(parts[1], pace=slow)
    stragglers = join_ranks(parts).stragglers
    assert stragglers.verdict == "none"
    assert "they exchange nothing" in stragglers.detail


# Processes of one run


@pytest.fixture(scope="module")
def hogwild(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three processes that all say rank 0 of 1 and share what they train."""
    folder = tmp_path_factory.mktemp("run")
    for place in range(3):
        write_job(folder / f"made{place}", make_job(Plan(ranks=1, steps=3, seed=place)))
        made = folder / f"made{place}/rank-00000"
        facts = msgspec.json.decode((made / "rank.json").read_bytes())
        facts |= {"pid": 100 + place, "world_size": 1}
        facts["communication"] = {
            "groups": [], "ddp": [], "placements": [], "flight_recorder": {},
            "trained": {"tensors": 8, "size_bytes": 87_360, "shared_tensors": 8},
        }  # fmt: skip
        (made / "rank.json").write_bytes(msgspec.json.encode(facts))
        (made / "comms.jsonl").unlink(missing_ok=True)
        made.rename(folder / ("rank-00000" + (f".{place + 1}" if place else "")))
    return folder


def test_processes_that_all_say_rank_0_have_names_and_none_is_dropped(hogwild: Path) -> None:
    explanation = explain_job(hogwild, cache=False)
    assert explanation.job is not None
    assert explanation.job.ranks == (0, 1, 2)
    assert [rank.called for rank in explanation.ranks] == ["process 1", "process 2", "process 3"]
    assert [rank.part.member.pid for rank in explanation.ranks if rank.part.member] == [
        100, 101, 102,
    ]  # fmt: skip
    assert "duplicate-ranks" not in {note.id for note in explanation.quality}
    answer = explanation_json(explanation)
    assert [(each["rank"], each["name"]) for each in answer["ranks"]] == [
        (0, "process 1"),
        (1, "process 2"),
        (2, "process 3"),
    ]


def test_the_same_rank_of_a_job_twice_is_still_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_job(tmp_path / name, make_job(Plan(ranks=2, steps=3)))
    explanation = explain_job(tmp_path / "a", tmp_path / "b", cache=False)
    assert len(explanation.ranks) == 2
    assert "same-part-twice" in {note.id for note in explanation.quality}


def test_ranks_of_a_job_keep_their_names(tmp_path: Path) -> None:
    write_job(tmp_path, make_job(Plan(ranks=2, steps=3)))
    explanation = explain_job(tmp_path, cache=False)
    assert [rank.called for rank in explanation.ranks] == ["rank 0", "rank 1"]
