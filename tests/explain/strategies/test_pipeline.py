"""The bubble is the step less compute, whatever the stage waits in."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.explain.findings import apply_rules
from stepscope.explain.findings.evidence import JobEvidence
from stepscope.explain.strategies.join import bound
from stepscope.records.strategies import Pipeline, RankPipeline

from ..build import Events, note, op, step
from ..conftest import Read
from .found import ENGINE, US, comm, compute, job_with, join, strategies_of

STAGE = [{"stage": 1, "stages": 2}]


def span(kind: str, start: float, end: float) -> Events:
    """As gloo records it: the call, and a span until the wait, on the caller's own thread."""
    name = {"send": "c10d::send", "recv": "c10d::recv_"}[kind]
    shapes, dtypes = [[4, 16]], ["float"]
    called = op(name, start=start, dur=2, shapes=[[[4, 16]], [], [], []], dtypes=["", "", "", ""])
    return called + note(
        f"gloo:{kind}", start=start + 1, dur=end - start - 1, shapes=shapes, dtypes=dtypes
    )


def gloo_stage(scale: float = 1) -> list[Events]:
    """A step of 1000: waits 200 and 300, computes 100 + 100 forward and 150 backward, twice.

    The send of the first output lasts until its wait, long after the next forward is done.
    """
    out = []
    for number, at in ((1, 0), (2, 1000)):
        out += [
            step(number, start=at, dur=1000),
            note("Forward 0", start=at + 0, dur=310),
            span("recv", at + 5, at + 205),
            op("aten::linear", start=at + 205, dur=100 * scale),
            span("send", at + 310, at + 480),
            span("recv", at + 315, at + 330),
            op("aten::linear", start=at + 340, dur=100 * scale),
            span("recv", at + 500, at + 800),
            op(ENGINE, start=at + 800, dur=150 * scale),
        ]
    return out


def only(found: tuple[object, ...]) -> RankPipeline:
    each = found[0]
    assert isinstance(each, RankPipeline)
    return each


def test_bubble_is_the_step_less_compute_even_inside_a_send(read: Read) -> None:
    each = only(strategies_of(read(*gloo_stage()), {"pipeline_stages": STAGE}))
    assert each.step_ns == 1000 * US
    assert each.compute_ns == 350 * US
    assert each.bubble_ns == 650 * US
    assert each.receive_wait_ns == (199 + 14 + 299) * US
    assert each.stage_indices == (1,)
    assert each.stages == 2
    assert each.microbatches == 1  # as annotated
    assert each.receives == 3


def test_receives_without_compute_between_are_one_micro_batch(read: Read) -> None:
    events = [*gloo_stage(), span("recv", 207, 209), span("recv", 1207, 1209)]
    events = [group for group in events if group[0]["name"] != "aten::linear"] + [
        op("aten::linear", start=at, dur=90) for at in (210, 345, 1210, 1345)
    ]
    assert only(strategies_of(read(*events))).receives == 3


def test_other_communication_is_not_bubble(read: Read) -> None:
    reduce = op("c10d::allreduce_", start=955, dur=2, shapes=[[[64]], []], dtypes=["", ""])
    reduce += note("gloo:all_reduce", start=958, dur=40, thread=7, shapes=[[64]], dtypes=["float"])
    each = only(strategies_of(read(*gloo_stage(), reduce)))
    assert each.other_comm_ns == 20 * US  # 40 in one of two steps
    assert each.compute_ns + each.other_comm_ns + each.bubble_ns == each.step_ns


def test_nccl_kernels_that_send_and_receive(read: Read) -> None:
    each = only(
        strategies_of(
            read(
                comm("recv", 0, 100, launched_at=-30, around=("c10d::recv_",)),
                compute(100, 200, launched_at=-20),
                comm("send", 200, 250, launched_at=-10, around=("c10d::send",)),
            )
        )
    )
    assert each.compute_ns == 100 * US
    assert each.bubble_ns == 150 * US
    assert each.receive_wait_ns == 100 * US


def test_an_all_to_all_of_sends_is_no_pipeline(read: Read) -> None:
    found = strategies_of(
        read(
            compute(0, 100, launched_at=-20),
            comm("SendRecv", 100, 150, launched_at=-10, around=("nccl:all_to_all",)),
        )
    )
    assert [type(each).__name__ for each in found] == ["RankOtherCommunication"]


def part(stage: int, **given: Any) -> RankPipeline:
    return RankPipeline(
        **{
            "stage_indices": (stage,),
            "stages": 3,
            "groups": (),
            "evidence": (),
            "step_ns": 1000,
            "compute_ns": 600,
            "other_comm_ns": 0,
            "bubble_ns": 400,
            "receive_wait_ns": 300,
            "microbatches": None,
            "receives": 12.0 if stage == 1 else 6.0,
            "late_forward_share": 0.5,
            "annotated": False,
            **given,
        }
    )


def joined(*parts: RankPipeline) -> Pipeline:
    (each,) = join([(own,) for own in parts])
    assert isinstance(each, Pipeline)
    return each


def test_ends_of_the_pipeline_tell_the_micro_batches(read: Read) -> None:
    each = joined(part(0), part(1), part(2))
    assert (each.size, each.replicas, each.microbatches) == (3, 1, 6)
    assert each.bound_share == pytest.approx(2 / 8)
    assert each.bubble_share == pytest.approx(0.4)
    assert each.schedule == "one forward one backward"
    assert each.deciding_stage is None


def test_the_stage_with_most_compute_decides(read: Read) -> None:
    each = joined(part(0), part(1, compute_ns=900, bubble_ns=100), part(2))
    assert each.imbalance == pytest.approx(900 / 700)
    assert each.deciding_stage == 1
    (finding,) = apply_rules("job", JobEvidence(job_with(), [each]))
    assert finding.id == "pipeline-bubble"
    assert finding.share == pytest.approx(0.3)
    assert finding.rank == 1
    assert [remedy.id for remedy in finding.remedies] == [
        "balance-stages",
        "micro-batches",
        "interleave",
    ]


def test_replicas_of_a_stage_are_one_stage(read: Read) -> None:
    each = joined(part(0), part(0, compute_ns=800), part(1), part(1))
    assert [stage.ranks for stage in each.stages] == [(0, 1), (2, 3)]
    assert each.stages[0].compute_ns == 700
    assert each.replicas == 2


def test_a_pipeline_without_a_bubble_is_not_a_finding(read: Read) -> None:
    each = joined(part(0, bubble_ns=10), part(1, bubble_ns=10), part(2, bubble_ns=10))
    assert apply_rules("job", JobEvidence(job_with(), [each])) == []


@pytest.mark.parametrize(("p", "m", "share"), [(4, 8, 3 / 11), (4, 4, 3 / 7), (1, 5, 0)])
def test_the_bound(p: int, m: int, share: float) -> None:
    assert bound(p, m) == pytest.approx(share)
