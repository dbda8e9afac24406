"""Each finding appears where its cause is, and is named like its function."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stepscope.explain import findings as findings_room
from stepscope.explain.findings import FINDINGS, load_rules
from stepscope.records.explanation import Finding, RankExplanation

from .build import (
    Events,
    call,
    frame,
    kernel,
    memcpy,
    note,
    op,
    overhead,
    step,
)
from .conftest import Explain

ROOM = Path(findings_room.__file__).parent


PRODUCTS = ("gemm", "attention", "norm")
MOVES = ("elementwise", "softmax", "layer_norm")


def busy(start: float, dur: float, names: tuple[str, ...] = PRODUCTS) -> Events:
    """Compute that was queued in time, in three kernels so that none dominates."""
    third = dur / 3
    return [
        event
        for i, name in enumerate(names)
        for event in kernel(name, start=start + i * third, dur=third, launched_at=-50)
    ]


def gap(start: float, dur: float) -> Events:
    """A host gap: the kernel behind it is launched just before it starts."""
    return kernel("late", start=start + dur, dur=15, launched_at=start + dur - 1, launch_dur=0.5)


def small_kernels() -> Events:
    """Kernels of 4 µs, each launched 6 µs after the one before ended."""
    return [
        event
        for i in range(50)
        for event in kernel(f"k{i % 5}", start=10 * i, dur=4, launched_at=10 * i - 1)
    ]


CASES: dict[str, tuple[Events, ...]] = {
    "healthy": (busy(0, 600, MOVES),),
    "unknown-work": (busy(0, 600),),
    "host-bound": (busy(0, 300), gap(300, 300)),
    "data-loading": (
        busy(0, 300),
        gap(300, 300),
        note("enumerate(DataLoader)#x.__next__", start=300, dur=290),
    ),
    "blocking-syncs": (
        busy(0, 300),
        gap(300, 100),
        op("aten::item", start=-10, dur=320),
        call("cudaStreamSynchronize", start=-9, dur=312),
    ),
    "exposed-communication": (
        busy(0, 300),
        kernel("ncclDevKernel_AllReduce", start=300, dur=100, stream=20, launched_at=-50),
    ),
    "exposed-copies": (busy(0, 300), memcpy(start=300, dur=100, launched_at=-50)),
    "profiler-overhead": (
        busy(0, 300),
        gap(300, 100),
        overhead("Buffer Flush", start=300, dur=90),
    ),
    "launch-bound": (small_kernels(),),
    "short-kernels": (small_kernels(),),
    "dominant-kernel": (
        kernel("gemm", start=0, dur=100, launched_at=-50),
        kernel("norm", start=100, dur=15, launched_at=-50),
        kernel("relu", start=115, dur=15, launched_at=-50),
    ),
}


def finding(rank: RankExplanation, name: str) -> Finding:
    return next(each for each in rank.findings if each.id == name)


@pytest.mark.parametrize("name", CASES)
def test_finding_appears_where_its_cause_is(explained: Explain, name: str) -> None:
    found = finding(explained(*CASES[name]), name)
    assert 0 < found.share <= 1
    assert found.title
    assert found.summary.endswith(".")
    assert found.evidence


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"healthy", "dominant-kernel"}))
def test_finding_does_not_appear_on_a_healthy_run(explained: Explain, name: str) -> None:
    assert name not in {each.id for each in explained(*CASES["healthy"]).findings}


def test_every_finding_that_a_file_of_the_room_declares_is_listed_by_its_name() -> None:
    files = [path for path in ROOM.glob("*.py") if path.stem != "evidence"]
    declared = [
        name for path in files for name in re.findall(r"\n@rule\(.*\ndef (\w+)", path.read_text())
    ]
    listed = [name.rpartition(".")[2] for names in FINDINGS.values() for name in names]
    assert sorted(listed) == sorted(declared)
    for scope, names in FINDINGS.items():
        rules = load_rules(scope)
        assert [rule.id.replace("-", "_") for rule in rules] == [
            name.rpartition(".")[2] for name in names
        ]
        assert {rule.scope for rule in rules} == {scope}
        assert all(rule.title for rule in rules)
    assert {name.replace("-", "_") for name in CASES} <= {*listed}


def test_every_finding_is_tested() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    for rule in (rule for scope in FINDINGS for rule in load_rules(scope)):
        assert f'"{rule.id}"' in tests
        assert re.fullmatch(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*", rule.id)


def test_shares_are_of_the_step(explained: Explain) -> None:
    # 300 µs compute, 300 idle, 15 compute
    rank = explained(*CASES["host-bound"])
    assert finding(rank, "host-bound").share == pytest.approx(300 / 615)
    assert finding(rank, "host-bound").severity == "high"
    # 300 µs compute, 100 NCCL alone
    rank = explained(*CASES["exposed-communication"])
    assert finding(rank, "exposed-communication").share == pytest.approx(0.25)


def test_the_gravest_comes_first_and_healthy_only_alone(explained: Explain) -> None:
    rank = explained(*CASES["host-bound"])
    shares = [each.share for each in rank.findings if each.severity == "high"]
    assert shares == sorted(shares, reverse=True)
    assert "healthy" not in {each.id for each in rank.findings}
    assert explained(*CASES["healthy"]).findings[0].id == "healthy"


def test_a_step_whose_work_is_not_known_is_not_called_healthy(explained: Explain) -> None:
    rank = explained(*CASES["unknown-work"])
    assert rank.efficiency is not None
    assert rank.efficiency.unknown_share == 1
    assert rank.efficiency.mfu is None
    assert [each.id for each in rank.findings] == ["unknown-work"]
    found = finding(rank, "unknown-work")
    assert found.share == pytest.approx(1)
    assert "100% of compute time is in kernels whose FLOPs" in found.evidence[0]
    assert [remedy.id for remedy in found.remedies] == ["stepscope-run"]
    few = [*busy(0, 540, MOVES), *kernel("gemm", start=540, dur=54, launched_at=-50)]
    assert explained(few).findings[0].id == "healthy"  # 9%: no loss of a tenth hides in it


def test_a_blocking_call_is_shown_with_its_line(explained: Explain) -> None:
    rank = explained(*CASES["blocking-syncs"], frame("train.py(42): log_loss", start=-20, dur=600))
    (place,) = finding(rank, "blocking-syncs").where
    assert (place.file, place.line) == ("train.py", 42)


def test_host_gaps_are_shown_with_the_users_line_not_the_librarys(explained: Explain) -> None:
    rank = explained(
        *CASES["host-bound"],
        frame("train.py(7): main", start=-20, dur=700),
        frame("augment.py(3): crop", start=290, dur=310),
        frame("torch/utils/data/_utils/collate.py(9): collate", start=295, dur=300),
    )
    (place, *_) = finding(rank, "host-bound").where
    assert (place.file, place.line, place.function) == ("augment.py", 3, "crop")


def test_the_costliest_place_comes_first(explained: Explain) -> None:
    rank = explained(
        busy(0, 300),
        gap(300, 100),
        gap(415, 250),
        frame("a_cheap.py(1): f", start=300, dur=100),
        frame("b_costly.py(2): g", start=415, dur=250),
    )
    places = finding(rank, "host-bound").where
    assert [place.file for place in places] == ["b_costly.py", "a_cheap.py"]


def test_average_times_in_the_evidence_cover_the_whole_trace(explained: Explain) -> None:
    """Also where the step's shares come from two of three steps."""
    rank = explained(
        *(step(n, start=200 * n - 5, dur=200) for n in range(3)),
        *(
            kernel(f"k{i % 5}", start=10 * i, dur=4, launched_at=10 * i - 1, launch_dur=0.5)
            for i in range(60)
        ),
    )
    assert rank.budget.basis == "cycles"
    lines = finding(rank, "launch-bound").evidence
    # 60 kernels of 4 µs; from 0 to 594 µs one begins every 9.9 µs
    assert any("runs 4.00 µs on average, and one starts every 9.90 µs" in line for line in lines)
