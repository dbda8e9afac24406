"""A made-up training run: nested host events, launches, streams and idle gaps."""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pytest
from msgspec.structs import replace

from stepscope.records.explanation import (
    Budget,
    Collective,
    Copy,
    Explanation,
    Finding,
    Gaps,
    Idle,
    Kernel,
    Launches,
    Module,
    Operator,
    Part,
    Place,
    PythonFunction,
    RankExplanation,
    Remedy,
    Step,
    Steps,
    StepTime,
    SyncCall,
    Timeline,
)
from stepscope.records.job import CollectiveCalls, Job, RankPart, RankSteps
from stepscope.records.quality import Note
from stepscope.records.trace import (
    Device,
    DeviceEvents,
    DeviceKind,
    HostEvents,
    HostKind,
    MemoryEvents,
    Thread,
    Trace,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

HOSTILE = "</script><img src=x onerror=alert(1)>{{ 7 * 7 }}"
ZERO_NS = 1_700_000_000_000_000_000


class MakeTrace(Protocol):
    def __call__(
        self, *, steps: int = 3, layers: int = 8, python: bool = True, rank: int | None = 0
    ) -> Trace: ...


class _Host:
    """Host events in the order they open, which is the order the record wants."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.stack: list[int] = []

    def open(self, kind: HostKind, name: int, thread: int, at: int) -> int:
        parent = self.stack[-1] if self.stack else -1
        self.rows.append([kind, name, thread, at, 0, parent])
        self.stack.append(len(self.rows) - 1)
        return self.stack[-1]

    def close(self, at: int) -> None:
        row = self.rows[self.stack.pop()]
        row[4] = at - row[3]


def made_trace(
    *, steps: int = 3, layers: int = 8, python: bool = True, rank: int | None = 0
) -> Trace:
    """Forward on the main thread, backward on another, one kernel a layer, an all-reduce a step."""
    strings: dict[str, int] = {}

    def code(text: str) -> int:
        return strings.setdefault(text, len(strings))

    rng = np.random.default_rng(7)
    host = _Host()
    kernels: list[tuple[int, int, int, int, int, int]] = []
    backward: list[tuple[int, int]] = []
    now, free = ZERO_NS, ZERO_NS

    def launch(name: str, kind: DeviceKind, stream: int, dur: int) -> None:
        nonlocal now, free
        row = host.open(HostKind.RUNTIME, code("cudaLaunchKernel"), 0, now)
        now += int(rng.integers(3_000, 6_000))
        host.close(now)
        start = max(now + 4_000, free)
        kernels.append((kind, code(name), stream, start, dur, row))
        free = start + dur

    for step in range(steps):
        host.open(HostKind.ANNOTATION, code(f"ProfilerStep#{step + 4}"), 0, now)
        loader = code("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
        host.open(HostKind.ANNOTATION, loader, 0, now)
        now += 400_000
        host.close(now)
        launch("Memcpy HtoD (Pageable -> Device)", DeviceKind.MEMCPY, 7, 60_000)
        for layer in range(layers):
            if python:
                host.open(HostKind.PYTHON, code("/home/me/train.py(42): forward"), 0, now)
                host.open(HostKind.PYTHON, code(f"nn.Module: Block_{layer}"), 0, now + 500)
            host.open(HostKind.OPERATOR, code("aten::linear"), 0, now + 1_000)
            host.open(HostKind.OPERATOR, code("aten::addmm"), 0, now + 1_500)
            now += 4_000
            launch(f"void at::native::gemm_{layer % 4}<float, 128>()", DeviceKind.KERNEL, 7, 30_000)
            host.close(now)
            host.close(now + 300)
            now += 1_000
            if python:
                host.close(now)
                host.close(now + 200)
                now += 400
        launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", DeviceKind.KERNEL, 20, 150_000)
        backward.append((now, now + 300_000))
        host.open(HostKind.OPERATOR, code("aten::item"), 0, now)
        now = max(now + 200_000, free)
        host.close(now)
        host.close(now + 5_000)
        now += 5_000

    for start, end in backward:
        host.open(HostKind.OPERATOR, code("autograd::engine::evaluate_function: Mm"), 1, start)
        host.close(end)
    return _trace(host, kernels, tuple(strings), rank)


def _trace(host: _Host, kernels: list[Any], strings: tuple[str, ...], rank: int | None) -> Trace:
    rows = np.array(host.rows, dtype=np.int64).reshape(-1, 6)
    work = np.array(kernels, dtype=np.int64).reshape(-1, 6)
    work = work[np.lexsort((work[:, 4], work[:, 3]))]
    return Trace(
        path="/runs/trace.json.gz",
        format="kineto",
        kind="cuda",
        rank=rank,
        world_size=2,
        backend="nccl",
        groups=(),
        devices=(Device(id=0, name="NVIDIA H200"),),
        facts={"with_stack": True},
        events=len(rows) + len(work),
        strings=strings,
        threads=(Thread(pid="1", tid="10", name="python"), Thread(pid="1", tid="11")),
        collectives=(),
        host=host_events(rows),
        device=device_events(work),
        memory=MemoryEvents(**{name: np.zeros(0, np.int64) for name in _fields(MemoryEvents)}),
    )


def _fields(record: type) -> list[str]:
    return list(record.__struct_fields__)  # type: ignore[attr-defined]


def host_events(rows: NDArray[np.int64]) -> HostEvents:
    known = dict(
        zip(("kind", "name", "thread", "start_ns", "dur_ns", "parent"), rows.T, strict=True)
    )
    return HostEvents(**_filled(HostEvents, known, len(rows)))


def device_events(rows: NDArray[np.int64]) -> DeviceEvents:
    names = ("kind", "name", "stream", "start_ns", "dur_ns", "launch")
    known = dict(zip(names, rows.T, strict=True))
    known["device"] = np.zeros(len(rows), dtype=np.int64)
    return DeviceEvents(**_filled(DeviceEvents, known, len(rows)))


def _filled(record: type, known: dict[str, NDArray[np.int64]], size: int) -> dict[str, Any]:
    narrow = {"kind": np.int8, "name": np.int32, "thread": np.int32, "parent": np.int32}
    narrow |= {"launch": np.int32, "stream": np.int32, "device": np.int32}
    absent = np.full(size, -1, dtype=np.int64)
    return {
        name: known.get(name, absent).astype(narrow.get(name, np.int64)) for name in _fields(record)
    }


def made_explanation(trace: Trace) -> RankExplanation:
    """Figures that add up, taken plainly from the trace."""
    device = trace.device
    end = device.start_ns + device.dur_ns
    order = np.argsort(device.start_ns)
    reach = np.maximum.accumulate(end[order]) if len(device) else end
    start = device.start_ns[order]
    open_ = np.flatnonzero(start[1:] > reach[:-1])
    gaps = Gaps(
        start_ns=reach[:-1][open_],
        end_ns=start[1:][open_],
        cause=(np.arange(len(open_)) % 7).astype(np.int8),
        frame=np.full(len(open_), -1, dtype=np.int32),
    )
    idle = int((gaps.end_ns - gaps.start_ns).sum())
    span = int(reach[-1] - start[0]) if len(device) else 0
    steps = _steps(trace)
    return RankExplanation(
        path=trace.path,
        rank=trace.rank,
        world_size=trace.world_size,
        device=trace.device_name,
        kind=trace.kind,
        events=trace.events,
        timeline=Timeline(
            start_ns=int(start[0]) if len(device) else 0,
            span_ns=span,
            compute_ns=span - idle,
            exposed_comm_ns=0,
            exposed_memory_ns=0,
            idle_ns=idle,
            comm_ns=10,
            memory_ns=0,
            hidden_comm_ns=4,
        ),
        idle=Idle(**dict.fromkeys(_fields(Idle), 0)),
        gaps=gaps,
        steps=Steps(
            source="profiler",
            steps=steps,
            cycles_ns=tuple(step.dur_ns for step in steps),
            window_start_ns=steps[0].start_ns if steps else 0,
            window_end_ns=steps[-1].start_ns if steps else 0,
        ),
        step_ms=StepTime(profiled=42.4),
        budget=made_budget(),
        kernels=_kernels(trace),
        operators=_operators(trace),
        modules=(
            Module(
                name="nn.Module: Block_0",
                calls=3,
                host_total_ns=9000,
                host_self_ns=4000,
                forward_device_ns=90_000,
                backward_device_ns=180_000,
            ),
        ),
        lines=(
            PythonFunction(
                file="/home/me/train.py",
                line=42,
                function="forward",
                calls=24,
                host_total_ns=90_000,
                host_self_ns=8_000,
                device_ns=120_000,
            ),
        ),
        launches=Launches(**dict.fromkeys(_fields(Launches), 0)),
        copies=(
            Copy(
                name="Memcpy HtoD (Pageable -> Device)",
                count=3,
                total_ns=180_000,
                size_bytes=12_000_000,
                gb_s=66.7,
                exposed_ns=120_000,
            ),
        ),
        syncs=(
            SyncCall(
                name="cudaStreamSynchronize",
                operator="aten::item",
                count=3,
                total_ns=900_000,
                file="/home/me/train.py",
                line=57,
            ),
        ),
        collectives=(
            Collective(
                kind="all_reduce",
                group="0",
                group_size=2,
                size_bytes=4_000_000,
                count=3,
                total_ns=450_000,
                exposed_ns=300_000,
                algbw_gb_s=26.0,
                busbw_gb_s=26.0,
            ),
        ),
        part=made_part(trace),
        strategies=(),
        findings=(),
        quality=(Note(id="unlinked", detail="12 device events have no recorded launch."),),
    )


def made_part(trace: Trace) -> RankPart:
    """A rank that brings nothing to the job's view."""
    none = np.zeros(0, np.int64)
    calls = {name: none for name in _fields(CollectiveCalls) if name != "groups"}
    return RankPart(
        rank=trace.rank or 0,
        calls=CollectiveCalls(groups=(), **calls),
        pace=RankSteps(**dict.fromkeys(_fields(RankSteps), none)),
    )


def made_budget() -> Budget:
    shares = {
        "compute": 0.47,
        "exposed_comm": 0.08,
        "exposed_memory": 0.015,
        "data_loading": 0.14,
        "sync": 0.06,
        "operators": 0.1,
        "python": 0.055,
        "profiler": 0.04,
        "idle_launch": 0.03,
        "idle_other": 0.01,
    }
    parts = tuple(Part(id=name, ms=42.4 * share, share=share) for name, share in shares.items())
    return Budget(step_ms=42.4, parts=parts, basis="cycles")


def _steps(trace: Trace) -> tuple[Step, ...]:
    host = trace.host
    rows = [
        row
        for row in np.flatnonzero(host.kind == HostKind.ANNOTATION).tolist()
        if trace.strings[host.name[row]].startswith("ProfilerStep#")
    ]
    return tuple(
        Step(
            name=trace.strings[host.name[row]],
            start_ns=int(host.start_ns[row]),
            dur_ns=int(host.dur_ns[row]),
        )
        for row in rows
    )


def _kernels(trace: Trace) -> tuple[Kernel, ...]:
    device = trace.device
    found = []
    for code in np.unique(device.name[device.kind <= DeviceKind.MEMSET]).tolist():
        dur = device.dur_ns[device.name == code]
        name = trace.strings[code]
        kind = "comm" if "nccl" in name else "memory" if name.startswith("Mem") else "compute"
        found.append(
            Kernel(
                name=name,
                kind=kind,
                count=len(dur),
                total_ns=int(dur.sum()),
                min_ns=int(dur.min()),
                max_ns=int(dur.max()),
            )
        )
    return tuple(sorted(found, key=lambda kernel: -kernel.total_ns))


def _operators(trace: Trace) -> tuple[Operator, ...]:
    host = trace.host
    found = []
    for code in np.unique(host.name[host.kind == HostKind.OPERATOR]).tolist():
        dur = host.dur_ns[host.name == code]
        found.append(
            Operator(
                name=trace.strings[code],
                shapes="[[8, 1024], [1024, 1024]]",
                dtypes="",
                calls=len(dur),
                host_total_ns=int(dur.sum()),
                host_self_ns=int(dur.sum() // 2),
                device_total_ns=int(dur.sum() // 3),
                device_self_ns=int(dur.sum() // 4),
            )
        )
    return tuple(found)


def made_report(*ranks: RankExplanation) -> Explanation:
    """A verdict over the ranks, with findings of every shape."""
    return Explanation(
        verdict="Your GPU waits for the host 39% of every step.",
        why="Data loading holds the device back for 5.9 of 42.4 ms.",
        next="Load batches in worker processes, then capture the step in a CUDA graph.",
        ranks=ranks,
        budget=made_budget(),
        findings=(
            Finding(
                id="data-loading",
                title="The device waits for data",
                share=0.14,
                severity="high",
                summary="Every step begins with 5.9 ms in which nothing runs on the device.",
                evidence=("3 of 3 steps wait in DataLoader.__next__", "num_workers looks like 0"),
                where=(Place(file="/home/me/train.py", line=31, function="train"),),
                remedies=(
                    Remedy(
                        id="dataloader-workers",
                        summary="Set num_workers and pin_memory on the DataLoader.",
                        predicted_ms=36.5,
                        low_ms=35.9,
                        high_ms=38.0,
                        step_ms=42.4,
                    ),
                ),
            ),
            Finding(
                id="sync-calls",
                title="loss.item() stops the host every step",
                share=0.06,
                severity="medium",
                summary="The host waits for the device and then has nothing queued.",
                evidence=("3 blocking calls, 0.9 ms",),
                where=(Place(file="/home/me/train.py", line=57),),
            ),
            Finding(
                id="short-kernels",
                title="Many short kernels",
                share=0.0,
                severity="low",
                summary="Half of the kernels run for less than 10 µs.",
                evidence=(),
            ),
        ),
    )


@pytest.fixture
def make_trace() -> MakeTrace:
    return made_trace


@pytest.fixture
def explain() -> Any:
    return made_explanation


@pytest.fixture
def report() -> Any:
    return made_report


def made_together(job: Job) -> Explanation:
    """A verdict over as many ranks as the job has, all with the same trace."""
    one = made_explanation(made_trace())
    ranks = [replace(one, rank=rank, path=f"/runs/{rank}.json") for rank in job.ranks]
    return replace(made_report(*ranks), job=job, quality=job.notes)


@pytest.fixture
def together() -> Any:
    return made_together


def made_empty(trace: Trace) -> Trace:
    """The same trace with no events at all."""
    none = np.zeros((0, 6), dtype=np.int64)
    return replace(trace, host=host_events(none), device=device_events(none), strings=())


def decoded(payload: str) -> tuple[dict[str, Any], dict[str, NDArray[np.int64]]]:
    """The data block as the page's payload.js reads it: head and columns."""
    raw = zlib.decompress(base64.b64decode(payload))
    size = int.from_bytes(raw[:4], "little")
    head = json.loads(raw[4 : 4 + size])
    columns = {}
    at = 4 + size
    for name, length, width in head["columns"]:
        planes = np.frombuffer(raw, np.uint8, length * width, at).reshape(width, length)
        scale = 256 ** np.arange(width, dtype=np.int64)
        columns[name] = (planes * scale[:, None]).sum(axis=0, dtype=np.int64)
        at += length * width
    assert at == len(raw)
    return head, columns


def unzigzagged(value: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where(value % 2, -(value + 1) // 2, value // 2)


@pytest.fixture
def decode() -> Any:
    return decoded


@pytest.fixture
def unzigzag() -> Any:
    return unzigzagged


@pytest.fixture
def empty_trace() -> Trace:
    return made_empty(made_trace())


@pytest.fixture
def hostile() -> str:
    return HOSTILE
