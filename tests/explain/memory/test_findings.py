"""When memory is worth a word, and when it is not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from stepscope.explain.findings.memory import find_leak, fragmentation, memory_near_limit
from stepscope.explain.memory.lifetimes import growth_of
from stepscope.records.memory import Fragmentation, Memory, OutOfMemory, SiteBytes

from . import training

GB = 10**9
MEMORY = Memory(
    source="capture",
    device="cuda",
    peak_bytes=70 * GB,
    reserved_bytes=72 * GB,
    phase="backward",
    measured="",
    categories={"parameters": 10 * GB, "activations": 55 * GB, "other": 5 * GB},
    limit_bytes=80 * GB,
)


@pytest.mark.parametrize(
    ("peak", "severity"), [(71 * GB, None), (72 * GB, "low"), (77 * GB, "low"), (78 * GB, "medium")]
)
def test_nearly_full_is_told_from_nine_tenths(peak, severity):
    finding = memory_near_limit.judge(replace(MEMORY, peak_bytes=peak))
    assert (finding.severity if finding else None) == severity


def test_nearly_full_says_what_fills_it():
    finding = memory_near_limit.judge(replace(MEMORY, peak_bytes=76 * GB))
    assert finding is not None
    assert finding.share == pytest.approx(0.95)
    assert finding.of == "memory"
    assert "activations (55.0 GB)" in finding.summary
    assert finding.evidence[0] == "76.0 GB of 80.0 GB allocated at the peak"


def test_without_a_limit_nothing_is_near_it():
    assert memory_near_limit.judge(replace(MEMORY, limit_bytes=None)) is None


def test_a_failed_request_is_grave_whatever_the_limit():
    failed = OutOfMemory(
        asked_bytes=4 * GB,
        device_free_bytes=1 * GB,
        allocated_bytes=60 * GB,
        reserved_bytes=78 * GB,
        file="model.py",
        line=7,
        function="forward",
    )
    memory = replace(MEMORY, limit_bytes=None, out_of_memory=(failed,))
    finding = memory_near_limit.judge(memory)
    assert finding is not None
    assert finding.severity == "high"
    assert (finding.where[0].file, finding.where[0].line) == ("model.py", 7)
    assert "18.0 GB held no tensor; the device had 1.00 GB free" in finding.evidence[0]


def _held(allocated: int, reserved: int, **more) -> Memory:
    found = Fragmentation(
        at="peak",
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        share=1 - allocated / reserved,
    )
    return replace(MEMORY, fragmentation=found, **more)


def test_much_reserved_and_unused_is_told():
    finding = fragmentation.judge(_held(30 * GB, 50 * GB))
    assert finding is not None
    assert finding.share == pytest.approx(0.4)
    assert finding.severity == "low"
    assert "62% of the available memory is reserved" in finding.evidence[-1]


@pytest.mark.parametrize(
    ("why", "allocated", "reserved"),
    [("little is unused", 40 * GB, 50 * GB), ("it is small", 100 * 10**6, 300 * 10**6)],
)
def test_little_unused_is_not(why, allocated, reserved):
    assert fragmentation.judge(_held(allocated, reserved)) is None


def test_it_is_graver_where_the_device_is_full_and_gravest_where_it_cost_a_request():
    crowded = fragmentation.judge(_held(45 * GB, 70 * GB))
    assert crowded is not None
    assert crowded.severity == "medium"
    failed = OutOfMemory(
        asked_bytes=10 * GB,
        device_free_bytes=None,
        allocated_bytes=45 * GB,
        reserved_bytes=70 * GB,
    )
    missed = fragmentation.judge(_held(45 * GB, 70 * GB, out_of_memory=(failed,)))
    assert missed is not None
    assert missed.severity == "high"
    assert "when a smaller request fails" in missed.summary
    larger = replace(
        failed, asked_bytes=30 * GB
    )  # more than is free: memory is full, not in pieces
    found = fragmentation.judge(_held(45 * GB, 70 * GB, out_of_memory=(larger,)))
    assert found is not None
    assert found.severity == "medium"


def test_a_leak_says_when_memory_is_full():
    growth = growth_of("trace", [10 * GB + n * 50 * 10**6 for n in range(6)])
    finding = find_leak(replace(MEMORY, growth=growth))
    assert finding is not None
    assert finding.severity == "high"
    assert finding.evidence[-1] == "at this rate memory is full in about 200 steps"
    slow = growth_of("trace", [10 * GB + n * 10**6 for n in range(6)])
    finding = find_leak(replace(MEMORY, growth=slow))
    assert finding is not None
    assert finding.severity == "medium"


@pytest.mark.parametrize(
    "ends",
    [
        [10 * GB] * 6,
        [10 * GB, 11 * GB, 10 * GB, 11 * GB],
        [10 * GB + 512 * n for n in range(6)],  # too little to matter
    ],
)
def test_what_is_not_steady_or_not_much_is_no_leak(ends):
    assert find_leak(replace(MEMORY, growth=growth_of("trace", ends))) is None


def test_nothing_captured_is_nothing_found(explained):
    from .. import build

    rank = explained(build.op("aten::mm", start=0, dur=5))
    assert rank.memory is None
    ids = {finding.id for finding in rank.findings}
    assert not ids & {"memory-near-limit", "fragmentation", "memory-leak"}


def test_a_leak_in_a_trace_is_found_and_a_healthy_training_has_none(explained):
    leaking = explained(*training.train(8, leak=4_000))
    assert "memory-leak" in {finding.id for finding in leaking.findings}
    healthy = explained(*training.train(8))
    assert "memory-leak" not in {finding.id for finding in healthy.findings}


def test_without_categories_the_place_is_named():
    site = SiteBytes(operator="forward", size_bytes=60 * GB, blocks=3, file="m.py", line=4)
    memory = replace(MEMORY, peak_bytes=79 * GB, categories={"other": 79 * GB}, by_site=(site,))
    finding = memory_near_limit.judge(memory)
    assert finding is not None
    assert "from m.py:4 (60.0 GB)" in finding.summary
    assert "allocated by m.py:4 60.0 GB" in finding.evidence
