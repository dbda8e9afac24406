import json

import pytest

from big_trace import repeated, to_ns

EVENTS = [
    {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#4", "pid": 1, "tid": 1,
     "ts": 100.000, "dur": 80.5, "args": {"External id": 7, "Ev Idx": 0}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1,
     "ts": 110.250, "dur": 5.0, "args": {"External id": 7, "cbid": 211, "correlation": 9}},
    {"ph": "s", "id": 9, "pid": 1, "tid": 1, "ts": 110.250, "cat": "ac2g", "name": "ac2g"},
    {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 120.125, "dur": 40.0,
     "args": {"External id": 7, "device": 0, "stream": 7, "correlation": 9}},
    {"ph": "f", "id": 9, "pid": 0, "tid": 7, "ts": 120.125, "cat": "ac2g", "name": "ac2g"},
    {"ph": "X", "cat": "cuda_sync", "name": "Context Sync", "pid": 0, "tid": 7, "ts": 161.0,
     "dur": 1.0, "args": {"correlation": 0}},
    {"name": "process_name", "ph": "M", "ts": 100.0, "pid": 1, "tid": 0, "args": {"name": "py"}},
    {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": 190.0},
]  # fmt: skip
PERIOD_US = 80.5 + 1000  # from the first start to the last end, and a pause


def make(repeats: int) -> dict:
    source = json.dumps({"schemaVersion": 1, "traceEvents": EVENTS, "traceName": "t"}).encode()
    one = len(b"".join(repeated(source, 1)))
    made = json.loads(b"".join(repeated(source, one * (repeats - 1))))
    assert sum(event["name"] == "gemm" for event in made["traceEvents"]) >= repeats
    return made


def named(trace: dict, name: str) -> list[dict]:
    return [event for event in trace["traceEvents"] if event["name"] == name]


def test_one_repeat_is_the_source():
    assert make(1) == {"schemaVersion": 1, "traceEvents": EVENTS, "traceName": "t"}


def test_repeats_follow_each_other_without_overlap():
    steps = named(make(3), "ProfilerStep#4")[:1] + named(make(3), "ProfilerStep#5")
    assert [step["ts"] for step in steps] == pytest.approx([100, 100 + PERIOD_US])


def test_launches_and_kernels_stay_joined_and_unique():
    trace = make(4)
    calls = {e["args"]["correlation"] for e in named(trace, "cudaLaunchKernel")}
    kernels = [e["args"]["correlation"] for e in named(trace, "gemm")]
    assert set(kernels) == calls
    assert len(set(kernels)) == len(kernels)
    arrows = [event["id"] for event in named(trace, "ac2g")]
    assert all(arrows.count(arrow) == 2 for arrow in arrows)


def test_absent_correlation_stays_absent():
    assert {e["args"]["correlation"] for e in named(make(3), "Context Sync")} == {0}


def test_metadata_comes_once_and_the_window_ends_behind_the_last_repeat():
    trace = make(3)
    assert len(named(trace, "process_name")) == 1
    last = max(e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X")
    assert named(trace, "Record Window End")[0]["ts"] > last


@pytest.mark.parametrize(
    ("text", "ns"), [(b"12", 12_000), (b"12.5", 12_500), (b"3843916644616.166", 3843916644616166)]
)
def test_times_are_exact(text, ns):
    assert to_ns(text) == ns
