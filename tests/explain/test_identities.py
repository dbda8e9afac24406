"""Whatever a trace holds, the numbers add up: real traces, damaged a few thousand times."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from stepscope import UnreadableInputError, explain_rank, read_trace
from stepscope.records.explanation import RankExplanation
from stepscope.records.trace import HostEvents, Trace
from stepscope.trace import links

from .build import AUTOGRAD, WORKER, call, frame, graph, kernel, memcpy, note, op, overhead, step
from .conftest import Read

MUTATIONS_OF_COLUMNS = 150
MUTATIONS_OF_JSON = 100
# Each block of damages is another draw of the same kinds; `make test-slow` draws the other three.
BLOCKS = [0, *(pytest.param(block, marks=pytest.mark.slow) for block in (1, 2, 3))]
SMALL = ("a100_event_sync", "a100_event_sync_multi_stream", "cpu_only_gloo_rank34")


def assert_adds_up(rank: RankExplanation) -> None:
    timeline, idle = rank.timeline, rank.idle
    parts = (
        timeline.compute_ns,
        timeline.exposed_comm_ns,
        timeline.exposed_memory_ns,
        timeline.idle_ns,
    )
    assert sum(parts) == timeline.span_ns
    assert min(parts) >= 0
    assert idle.host_ns + idle.launch_ns + idle.other_ns == timeline.idle_ns
    causes = (
        idle.data_loading_ns,
        idle.sync_ns,
        idle.operators_ns,
        idle.python_ns,
        idle.profiler_ns,
    )
    assert sum(causes) == idle.host_ns
    assert min(causes) >= 0
    assert idle.after_sync_ns <= idle.host_ns
    assert int((rank.gaps.end_ns - rank.gaps.start_ns).sum()) == timeline.idle_ns
    assert timeline.hidden_comm_ns + timeline.exposed_comm_ns == timeline.comm_ns
    assert timeline.exposed_memory_ns <= timeline.memory_ns
    assert timeline.overlap is None or 0 <= timeline.overlap <= 1
    shares = [part.share for part in rank.budget.parts]
    assert all(0 <= share <= 1 for share in shares)
    divided = timeline.span_ns or rank.steps.cycles_ns
    assert sum(shares) == pytest.approx(1 if divided else 0, abs=1e-9)
    assert sum(part.ms for part in rank.budget.parts) == pytest.approx(
        rank.budget.step_ms if divided else 0
    )
    assert all(0 <= finding.share <= 1 for finding in rank.findings)
    empty = rank.launches.queue_empty_share
    assert empty is None or 0 <= empty <= 1
    assert rank.launches.linked + rank.launches.unlinked == rank.launches.device_events
    assert sum(cycle for cycle in rank.steps.cycles_ns) == (
        rank.steps.window_end_ns - rank.steps.window_start_ns if rank.steps.cycles_ns else 0
    )


def test_the_identities_hold_on_every_real_trace(shared_trace: Path) -> None:
    assert_adds_up(explain_rank(read_trace(shared_trace, cache=False)))


def training(steps: int = 3) -> list[list[dict[str, Any]]]:
    """Everything a trace can hold, small."""
    out: list[list[dict[str, Any]]] = []
    for n in range(steps):
        at = 1000 * n
        out += [
            step(n, start=at, dur=990),
            frame("train.py(10): step", start=at + 1, dur=985),
            note("enumerate(DataLoader)#x.__next__", start=at + 2, dur=90),
            frame("nn.Module: Net_0", start=at + 100, dur=200),
            op("aten::linear", start=at + 110, dur=100, shapes=[[4, 4]], dtypes=["float"]),
            op("aten::addmm", start=at + 120, dur=60, shapes=[[4, 4]], sequence=n),
            memcpy(start=at + 60, dur=20, launched_at=at + 50, stream=9, bytes=4096),
            kernel("gemm", start=at + 140, dur=80, launched_at=at + 130),
            kernel("relu", start=at + 222, dur=4, launched_at=at + 205),
            kernel("early", start=at + 230, dur=8),
            op(
                "AddmmBackward0",
                start=at + 320,
                dur=100,
                thread=AUTOGRAD,
                sequence=n,
                forward_thread=1,
            ),
            kernel("gemm_bwd", start=at + 400, dur=90, launched_at=at + 330, thread=AUTOGRAD),
            kernel(
                "ncclDevKernel_AllReduce",
                start=at + 450,
                dur=100,
                stream=20,
                launched_at=at + 410,
                thread=AUTOGRAD,
            ),
            op("aten::item", start=at + 560, dur=100),
            call("cudaStreamSynchronize", start=at + 565, dur=90),
            overhead("Buffer Flush", start=at + 600, dur=30),
            graph(
                [kernel("n1", start=at + 720, dur=20), kernel("n2", start=at + 741, dur=20)],
                launched_at=at + 700,
            ),
            note("gloo:all_reduce", start=at + 800, dur=50, thread=WORKER),
            note("Optimizer.step#SGD.step", start=at + 900, dur=50),
        ]
    return out


# --- columns -------------------------------------------------------------------------------------


def retimed(host: HostEvents, order: np.ndarray, **changed: np.ndarray) -> HostEvents:
    """Host rows in another selection or with other times, nested again."""
    columns = {f: getattr(host, f)[order] for f in host.__struct_fields__} | changed
    again = links.host_order(columns)
    columns = {name: values[again] for name, values in columns.items()}
    columns["forward_of"] = np.full(len(again), -1, np.int32)
    end = columns["start_ns"] + columns["dur_ns"]
    columns["parent"] = links.find_parents(columns["thread"], columns["start_ns"], end)
    return replace(host, **columns)


def mutate_columns(trace: Trace, chance: random.Random) -> Trace:
    """Drop, repeat, shift and stretch rows of both tables; then link by correlation again."""
    rng = np.random.default_rng(chance.randrange(2**32))
    host, device = trace.host, trace.device
    scale = int(10 ** chance.uniform(2, 7))
    if len(host) and chance.random() < 0.7:
        rows = rng.choice(len(host), rng.integers(1, 2 * len(host)))
        start = host.start_ns[rows]
        dur = host.dur_ns[rows]
        moved = rng.random(len(rows)) < chance.choice((0, 0.1, 1))
        start = start + np.where(moved, rng.integers(-scale, scale, len(rows)), 0)
        dur = np.where(rng.random(len(rows)) < 0.1, rng.integers(0, scale, len(rows)), dur)
        host = retimed(host, rows, start_ns=start, dur_ns=dur)
    columns = {f: getattr(device, f) for f in device.__struct_fields__}
    if len(device) and chance.random() < 0.8:
        rows = rng.choice(len(device), rng.integers(0, 2 * len(device)))
        columns = {name: values[rows] for name, values in columns.items()}
        moved = rng.random(len(rows)) < chance.choice((0, 0.1, 1))
        columns["start_ns"] = columns["start_ns"] + np.where(
            moved, rng.integers(-scale, scale, len(rows)), 0
        )
        short = rng.random(len(rows)) < 0.1
        columns["dur_ns"] = np.where(short, rng.integers(0, 3, len(rows)), columns["dur_ns"])
        if chance.random() < 0.3 and len(rows):
            columns["correlation"] = rng.choice(columns["correlation"], len(rows))
        order = np.lexsort((columns["start_ns"] + columns["dur_ns"], columns["start_ns"]))
        columns = {name: values[order] for name, values in columns.items()}
    found = {f: getattr(host, f) for f in host.__struct_fields__}
    columns["launch"] = links.find_launches(found, columns["correlation"])
    return replace(trace, host=host, device=replace(device, **columns))


def seeds(block: int, count: int) -> range:
    return range(block * count, (block + 1) * count)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_identities_hold_however_columns_are_damaged(read: Read, block: int) -> None:
    trace = read(*training())
    for seed in seeds(block, MUTATIONS_OF_COLUMNS):
        assert_adds_up(explain_rank(mutate_columns(trace, random.Random(seed))))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("block", BLOCKS)
def test_the_identities_hold_however_real_columns_are_damaged(
    shared: Path, name: str, block: int
) -> None:
    (path,) = (shared / "traces").glob(f"*/{name}.json.gz")
    trace = read_trace(path, cache=False)
    for seed in seeds(block, MUTATIONS_OF_COLUMNS):
        assert_adds_up(explain_rank(mutate_columns(trace, random.Random(seed))))


# --- JSON ----------------------------------------------------------------------------------------


def drop(events: list[Any], at: int, chance: random.Random) -> None:
    del events[at]


def repeat(events: list[Any], at: int, chance: random.Random) -> None:
    events.insert(chance.randrange(len(events)), copy.deepcopy(events[at]))


def shift(events: list[Any], at: int, chance: random.Random) -> None:
    if isinstance(events[at].get("ts"), int | float):
        events[at]["ts"] += chance.choice((-1, 1)) * 10 ** chance.uniform(-3, 5)


def stretch(events: list[Any], at: int, chance: random.Random) -> None:
    events[at]["dur"] = chance.choice((-5, 0, 0.001, 3, 1e4, 1e9))


def spoil_number(events: list[Any], at: int, chance: random.Random) -> None:
    key = chance.choice(("ts", "dur", "pid", "tid"))
    events[at][key] = chance.choice((None, "", "7", -1, 2**40, 1e300))


def confuse_correlation(events: list[Any], at: int, chance: random.Random) -> None:
    other = events[chance.randrange(len(events))]
    mine, theirs = events[at].get("args"), other.get("args")
    if isinstance(mine, dict) and isinstance(theirs, dict):
        mine["correlation"] = theirs.get("correlation", chance.choice((0, -1, "x", 1)))


def rename(events: list[Any], at: int, chance: random.Random) -> None:
    events[at]["name"] = chance.choice(
        ("ProfilerStep#9", "cudaStreamSynchronize", "ncclKernel", "gloo:barrier", "c10d::x", "")
    )


def recategorise(events: list[Any], at: int, chance: random.Random) -> None:
    events[at]["cat"] = chance.choice(
        ("kernel", "cpu_op", "cuda_runtime", "overhead", "python_function", "gpu_memset", "odd")
    )


DAMAGE: tuple[Callable[[list[Any], int, random.Random], None], ...] = (
    drop,
    repeat,
    shift,
    stretch,
    spoil_number,
    confuse_correlation,
    rename,
    recategorise,
)


def damaged(text: str, chance: random.Random) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(text)  # as a copy: quicker than to copy what was read
    events = content["traceEvents"]
    for _ in range(chance.choice((1, 3, 30))):
        if events:
            chance.choice(DAMAGE)(events, chance.randrange(len(events)), chance)
    return content


def hold_while_damaged(text: str, path: Path, block: int) -> int:
    read = 0
    for seed in seeds(block, MUTATIONS_OF_JSON):
        path.write_text(json.dumps(damaged(text, random.Random(seed))))
        try:
            trace = read_trace(path, cache=False)
        except UnreadableInputError:
            continue
        assert_adds_up(explain_rank(trace))
        read += 1
    return read


@pytest.mark.parametrize("block", BLOCKS)
def test_the_identities_hold_however_a_file_is_damaged(tmp_path: Path, block: int) -> None:
    events = [event for group in training(2) for event in group]
    text = json.dumps({"schemaVersion": 1, "traceEvents": events})
    assert hold_while_damaged(text, tmp_path / "trace.json", block) > 0.9 * MUTATIONS_OF_JSON


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("block", BLOCKS)
def test_the_identities_hold_however_a_real_file_is_damaged(
    shared: Path, tmp_path: Path, name: str, block: int
) -> None:
    (source,) = (shared / "traces").glob(f"*/{name}.json.gz")
    text = gzip.decompress(source.read_bytes()).decode()
    assert hold_while_damaged(text, tmp_path / "trace.json", block) > 0.9 * MUTATIONS_OF_JSON
