"""`explain --perfetto`: the trace's own events unchanged, and our tracks by the format's rules."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hostile_names import MARKUP as HOSTILE
from stepscope.errors import StepscopeError, UsageError
from stepscope.explain.device_path import device_path
from stepscope.explain.explain_job import JobTraces
from stepscope.trace.formats.kineto import EventList
from stepscope.ui.api import explain_paths
from verb_process import run_verb

GOLDEN = Path(__file__).parent.parent / "golden"
SINGLE = ["h200-resnet18/rank-00000/trace.json.gz", "cuda_step.json.gz"]
Event = dict[str, Any]


def _read(path: Path) -> Any:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(text)


def _enrich(source: Path, target: Path) -> tuple[list[Event], list[Event]]:
    """The original's events, and ours."""
    explain_paths([source], cache=False, html=None, perfetto=target, quiet=True)
    before, after = _read(source), _read(target)
    events, theirs = after["traceEvents"], before["traceEvents"]
    ours = len(events) - len(theirs)
    assert events[ours:] == theirs
    del before["traceEvents"], after["traceEvents"]
    assert before == after
    return theirs, events[:ours]


def _tracks(ours: list[Event]) -> dict[str, list[Event]]:
    names = {one["tid"]: one["args"]["name"] for one in ours if one["name"] == "thread_name"}
    tracks: dict[str, list[Event]] = defaultdict(list)
    for one in ours:
        if one["ph"] != "M":
            tracks[names[one["tid"]]].append(one)
    return tracks


def _check_rules(theirs: list[Event], ours: list[Event]) -> None:
    """A process of our own; slices of a track follow each other; no flow or id is ours."""
    pids = {one["pid"] for one in ours}
    assert len(pids) == 1
    assert not pids & {one.get("pid") for one in theirs}
    assert {one["ph"] for one in ours} <= {"M", "X", "i"}
    assert not any("id" in one for one in ours)
    for track in _tracks(ours).values():
        slices = sorted((one["ts"], one["ts"] + one["dur"]) for one in track if one["ph"] == "X")
        assert all(end > start for start, end in slices)
        assert all(second[0] - first[1] > -0.001 for first, second in pairwise(slices))
        assert all(one["s"] == "t" for one in track if one["ph"] == "i")


@pytest.fixture(scope="module")
def enriched(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Event], list[Event]]:
    return _enrich(GOLDEN / SINGLE[0], tmp_path_factory.mktemp("perfetto") / "out.json.gz")


@pytest.mark.parametrize(
    "name", [SINGLE[1], pytest.param("cuda_graph.json.gz", marks=pytest.mark.slow)]
)
def test_our_tracks_keep_the_rules_and_the_traces_own_events_stay(
    name: str, tmp_path: Path
) -> None:
    theirs, ours = _enrich(GOLDEN / name, tmp_path / "out.json")
    _check_rules(theirs, ours)
    tracks = _tracks(ours)
    assert {"budget by cycle", "budget", "critical path", "findings"} <= set(tracks)
    low = min(one["ts"] for one in theirs if one["ph"] == "X")
    high = max(one["ts"] + one["dur"] for one in theirs if one["ph"] == "X")
    assert all(low - 1 <= one["ts"] <= high + 1 for track in tracks.values() for one in track)


def test_parts_fill_the_cycles_and_agree_with_the_budget(
    enriched: tuple[list[Event], list[Event]],
) -> None:
    theirs, ours = enriched
    _check_rules(theirs, ours)
    source = GOLDEN / SINGLE[0]
    tracks = _tracks(ours)
    rank = explain_paths([source], cache=False, html=None, quiet=True).ranks[0]
    cycles = [one["dur"] * 1000 for one in tracks["budget by cycle"]]
    assert cycles == pytest.approx(rank.steps.cycles_ns)
    begin, end = rank.steps.window_start_ns, rank.steps.window_end_ns
    base = EventList(source).base_ns
    inside = [
        (
            one["name"],
            max(one["ts"] * 1000 + base, begin),
            min(one["ts"] * 1000 + base + one["dur"] * 1000, end),
        )
        for one in tracks["budget"]
    ]
    sizes: dict[str, float] = defaultdict(float)
    for name, start, stop in inside:
        sizes[name] += max(0.0, stop - start)
    assert sum(sizes.values()) == pytest.approx(end - begin, rel=1e-4)
    budget = {part.id: part.share for part in (rank.profiled_budget or rank.budget).parts}
    assert sizes["Compute"] / (end - begin) == pytest.approx(budget["compute"], abs=2e-3)


def test_the_critical_path_leaves_no_gap() -> None:
    traces = JobTraces([GOLDEN / SINGLE[0]], cache=False)
    path = str(GOLDEN / SINGLE[0])
    (pieces,) = traces.visit_here(path, lambda analysis, _: device_path(analysis)).results
    assert len(pieces) > 100
    assert all(one.end_ns == two.start_ns for one, two in pairwise(pieces))
    assert {one.kind for one in pieces} == {"device", "queue"}  # the host is far ahead


def _call(name: str, start: float, dur: float, correlation: int) -> Event:
    lane = {"pid": 7, "tid": 7, "args": {"correlation": correlation}}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": start, "dur": dur, **lane}


def _kernel(name: str, start: float, dur: float, stream: int, correlation: int) -> Event:
    args = {"correlation": correlation, "stream": stream, "device": 0}
    lane = {"pid": 0, "tid": stream, "args": args}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": dur, **lane}


def test_the_path_goes_through_queue_streams_host_and_sync(tmp_path: Path) -> None:
    """first runs, second was queued behind it; the host waits for both, then launches third; fourth
    runs on another stream and waits for third."""
    events = [
        _call("cudaLaunchKernel", 100, 5, 1),
        _kernel("first", 110, 40, 7, 1),
        _call("cudaLaunchKernel", 120, 5, 2),
        _kernel("second", 151, 19, 7, 2),
        _call("cudaDeviceSynchronize", 126, 46, 3),
        _call("cudaLaunchKernel", 200, 5, 4),
        _kernel("third", 210, 20, 7, 4),
        _call("cudaLaunchKernel", 206, 2, 5),
        _kernel("fourth", 232, 8, 20, 5),
    ]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    found = JobTraces([trace], cache=False).visit_here(
        str(trace), lambda analysis, _: device_path(analysis)
    )
    (pieces,) = found.results
    assert [(one.kind, one.start_ns // 1000, one.end_ns // 1000) for one in pieces] == [
        ("device", 110, 150),
        ("queue", 150, 151),
        ("device", 151, 170),
        ("sync", 170, 172),
        ("host", 172, 200),
        ("launch", 200, 210),
        ("device", 210, 230),
        ("queue", 230, 232),
        ("device", 232, 240),
    ]


def test_the_hosts_part_of_the_path_names_its_operators(tmp_path: Path) -> None:
    lane = {"ph": "X", "cat": "cpu_op", "pid": 7, "tid": 7}
    events = [
        _call("cudaLaunchKernel", 100, 5, 1),
        _kernel("first", 110, 10, 7, 1),
        {**lane, "name": "aten::add", "ts": 105, "dur": 35},
        {**lane, "name": "aten::inner", "ts": 110, "dur": 5},
        {**lane, "name": "aten::mul", "ts": 150, "dur": 60},
        _call("cudaLaunchKernel", 190, 5, 2),
        _kernel("second", 200, 10, 7, 2),
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    _, ours = _enrich(tmp_path / "trace.json", tmp_path / "out.json")
    path = [(one["name"], one["ts"], one["dur"]) for one in _tracks(ours)["critical path"]]
    assert path == [
        ("host: aten::add", 110, 30),
        ("CPU: Python between operators", 140, 10),
        ("host: aten::mul", 150, 40),
        ("launch", 190, 10),
        ("second", 200, 10),
    ]


def test_a_large_file_goes_through_in_pieces(tmp_path: Path) -> None:
    event = json.dumps({"ph": "X", "name": "x" * 200, "pid": 1, "tid": 1, "ts": 1, "dur": 1})
    (tmp_path / "trace.json").write_text(f'{{"traceEvents":[{",".join([event] * 40_000)}]}}')
    size = 0
    tracemalloc.start()
    for piece in EventList(tmp_path / "trace.json").with_events([b"{}"], ends_early=False):
        size += len(piece)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == (tmp_path / "trace.json").stat().st_size + len(b"\n{},")
    assert peak < size / 3


def test_findings_are_instants_with_their_text(
    enriched: tuple[list[Event], list[Event]],
) -> None:
    verdict, *findings = _tracks(enriched[1])["findings"]
    assert verdict["ph"] == "i"
    assert verdict["args"]["next"]
    assert findings
    assert all(one["args"]["summary"] and one["args"]["severity"] for one in findings)


def test_several_ranks_get_a_file_each_with_the_jobs_path(tmp_path: Path) -> None:
    run = GOLDEN / "cpu-two-ranks"
    explain_paths([run], cache=False, html=None, perfetto=tmp_path / "job.json.gz", quiet=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "job-rank-0.json.gz",
        "job-rank-1.json.gz",
    ]
    paths = 0
    for rank in (0, 1):
        ours = _read(tmp_path / f"job-rank-{rank}.json.gz")["traceEvents"]
        tracks = _tracks([one for one in ours if one["pid"] == ours[0]["pid"]])
        assert tracks["idle causes"]
        paths += len(tracks["critical path of the job"])
    assert paths > 0


def test_a_bare_list_a_base_after_the_events_and_names_with_markup(tmp_path: Path) -> None:
    whole = _read(GOLDEN / SINGLE[1])
    events = whole.pop("traceEvents")
    for event in events:
        if event.get("cat") == "kernel":
            event["name"] = HOSTILE
    base = whole.pop("baseTimeNanoseconds", 0)
    (tmp_path / "bare.json").write_text(json.dumps(events))
    late = {"traceEvents": events, "baseTimeNanoseconds": base or 1_700_000_000_000_000_000}
    (tmp_path / "late.json").write_text(json.dumps(late))
    explain_paths(
        [tmp_path / "bare.json"], cache=False, html=None, perfetto=tmp_path / "a.json", quiet=True
    )
    bare = _read(tmp_path / "a.json")
    assert bare[-len(events) :] == events
    _, ours = _enrich(tmp_path / "late.json", tmp_path / "b.json")
    assert [one for one in bare if one["pid"] == bare[0]["pid"]] == ours
    assert any(one["name"] == HOSTILE for one in _tracks(ours)["critical path"])


def test_a_file_that_ends_early_is_closed_after_its_last_whole_event(tmp_path: Path) -> None:
    text = gzip.decompress((GOLDEN / SINGLE[0]).read_bytes())
    (tmp_path / "cut.json").write_bytes(text[: len(text) * 3 // 4])
    explain_paths(
        [tmp_path / "cut.json"], cache=False, html=None, perfetto=tmp_path / "out.json", quiet=True
    )
    events = _read(tmp_path / "out.json")["traceEvents"]
    theirs = json.loads(text)["traceEvents"]
    kept = [one for one in events if one["pid"] != events[0]["pid"]]
    assert len(kept) > len(theirs) // 2
    assert kept == theirs[: len(kept)]


def test_the_verb_writes_it_and_says_where(tmp_path: Path) -> None:
    options = ["--json", "--perfetto", tmp_path / "p.json.gz", "--no-cache"]
    done = run_verb("explain", GOLDEN / SINGLE[1], *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == 1
    assert f"for ui.perfetto.dev: {tmp_path / 'p.json.gz'}" in done.stderr
    assert _read(tmp_path / "p.json.gz")["traceEvents"]


def test_a_folder_that_is_missing_and_a_trace_that_is_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its folder does not exist"):
        explain_paths(
            [GOLDEN / SINGLE[1]],
            cache=False,
            html=None,
            perfetto=tmp_path / "no/p.json",
            quiet=True,
        )
    copy = tmp_path / "trace.json.gz"
    copy.write_bytes((GOLDEN / SINGLE[1]).read_bytes())
    with pytest.raises(StepscopeError, match="is the trace itself"):
        explain_paths([copy], cache=False, html=None, perfetto=copy, quiet=True)
    assert copy.read_bytes() == (GOLDEN / SINGLE[1]).read_bytes()
