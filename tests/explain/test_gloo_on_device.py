"""gloo with a device's tensors: found by its copies or by the capture; the CPU's are no finding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from stepscope.explain.rank import explain_rank
from stepscope.explain.verdict import judge
from stepscope.records.job import RankFolder

from .build import WORKER, Events, kernel, memcpy, note

if TYPE_CHECKING:
    from stepscope.records.explanation import Finding, RankExplanation
    from stepscope.records.trace import Trace

    from .conftest import Read

GLOO, BOTH = "cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl"


def training(*, copies: bool) -> list[Events]:
    """Compute 0 to 300, then gloo 300 to 900 on its own thread, then compute 900 to 1000."""
    out = [
        kernel("gemm", start=0, dur=300, launched_at=-50),
        note("gloo:all_reduce", start=300, dur=600, thread=WORKER),
        kernel("gemm", start=900, dur=100, launched_at=890),
    ]
    if copies:
        out.append(memcpy(start=880, dur=20, launched_at=870, thread=WORKER))
    return out


def layout(backend: str, **more: Any) -> RankFolder:
    groups = [{"name": "0", "backend": backend, "size": 2}]
    return RankFolder(layout={"groups": groups, **more})


def found(trace: Trace, folder: RankFolder | None = None) -> Finding | None:
    rank: RankExplanation = explain_rank(trace, folder=folder)
    return next((each for each in rank.findings if each.id == "gloo-on-device"), None)


def test_idle_while_gloo_copies_to_the_device_is_its_share(read: Read) -> None:
    """Of 1000 the device idles 300 to 880 while gloo works: 58%."""
    finding = found(read(*training(copies=True)))
    assert finding is not None
    assert finding.share == pytest.approx(0.58)
    assert finding.severity == "high"
    assert finding.title == "gloo instead of NCCL"
    assert 'init_process_group("nccl")' in finding.remedies[0].summary


def test_the_capture_tells_where_copies_are_not_linked(read: Read) -> None:
    finding = found(read(*training(copies=False)), layout(GLOO, ddp=[{"module": "Net"}]))
    assert finding is not None
    assert "group 0: backend cpu:gloo,cuda:gloo" in finding.evidence


@pytest.mark.parametrize(
    "folder",
    [None, layout(BOTH, ddp=[{"module": "Net"}]), layout(GLOO)],
    ids=["bare trace", "NCCL for the device", "no model is spread"],
)
def test_gloo_for_tensors_of_the_cpu_is_as_it_should_be(
    read: Read, folder: RankFolder | None
) -> None:
    assert found(read(*training(copies=False)), folder) is None


def test_a_cpu_has_nothing_better(read: Read) -> None:
    assert found(read(note("gloo:all_reduce", start=0, dur=100))) is None


def test_it_leads_before_the_symptoms_it_causes(read: Read) -> None:
    rank = explain_rank(read(*training(copies=True)))
    assert "host-bound" in {each.id for each in rank.findings}
    assert judge((rank,), ()).findings[0].id == "gloo-on-device"
