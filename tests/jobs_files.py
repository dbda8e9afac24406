"""Simulated jobs on disk: Kineto's JSON, bare or in a run folder as `stepscope run` writes it.

Ranks that do the same things in the same order share one template; only times and groups differ, so
a thousand files of a megabyte take seconds. Unlike in real traces, gloo's sends and receives
include their waits: a real trace only shows when they are posted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from isal import igzip
from numpy.typing import NDArray

from jobs import FIRST_STEP, Job, Timeline
from jobs_plan import CALL_NS, LABELS, PIPELINES, Layer
from stepscope.records.job import KINDS

BASE_NS = 1_789_000_000_000_000_000  # Kineto's base, before any clock's first time
MAIN, WORKER, STREAM, COMM_STREAM = 100, 110, 7, 20
_LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
_GLOO = {"all_reduce": "allreduce_", "all_gather": "_allgather_base_", "send": "send",
         "reduce_scatter": "_reduce_scatter_base_", "broadcast": "broadcast_",
         "recv": "recv_"}  # fmt: skip
_GLOO_SPAN = {"reduce_scatter": "all_reduce"}
_NCCL_CALL = {"all_reduce": "allreduce", "all_gather": "_allgather_base", "send": "send",
              "reduce_scatter": "_reduce_scatter_base", "broadcast": "broadcast",
              "recv": "recv"}  # fmt: skip
_NCCL_KERNEL = {
    "all_reduce": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "all_gather": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "reduce_scatter": "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"
    "(ncclDevKernelArgsStorage<4096ul>)",
    "broadcast": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "send": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "recv": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}
_BEFORE_LAUNCH_NS = 40e3  # how long before a kernel its operator begins


@dataclass(frozen=True, slots=True)
class _Spans:
    """Events of one rank: their times, and their texts, which equal ranks share."""

    texts: Callable[[], list[str]]
    start: NDArray[np.float64]
    end: NDArray[np.float64]


def write_job(
    folder: Path,
    job: Job,
    *,
    target_bytes: int | None = None,
    compressed: bool = True,
    run_folder: bool = True,
) -> list[Path]:
    """One trace per rank; returns the paths. `target_bytes` is the approximate size of each text.

    In a run folder the trace is in rank-00000/ with clock.json, rank.json, steps.jsonl and, on the
    CPU, comms.jsonl; otherwise the files are rank0.json(.gz) and so on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces = _pieces(job, target_bytes)
    templates: dict[bytes, bytes] = {}
    ending = ".json.gz" if compressed else ".json"
    paths = []
    for rank in range(job.plan.ranks):
        text = trace_text(job, rank, pieces, templates)
        home = folder / f"rank-{rank:05d}" if run_folder else folder
        path = home / ("trace" if run_folder else f"rank{rank}")
        path = path.with_name(path.name + ending)
        if run_folder:
            home.mkdir(exist_ok=True)
            _write_beside(home, job, rank)
        path.write_bytes(igzip.compress(text, 1, mtime=0) if compressed else text)
        paths.append(path)
    if run_folder:
        (folder / "run.json").write_text(json.dumps({"schema": 1, "command": ["train.py"]}))
    return paths


def trace_text(
    job: Job, rank: int, pieces: int = 3, templates: dict[bytes, bytes] | None = None
) -> bytes:
    """One rank's trace; every stretch of compute is written as several operators."""
    spans = (_on_device if job.plan.backend == "nccl" else _on_cpu)(job, rank, pieces)
    start = np.concatenate([each.start for each in spans])
    end = np.concatenate([each.end for each in spans])
    known = {} if templates is None else templates
    alike = _likeness(job, rank)
    if alike not in known:
        rows = (text for each in spans for text in each.texts())
        known[alike] = ",\n".join(f'  {{"ph": "X", {text}}}' for text in rows).encode()
    read = job.clocks.read(rank, np.stack((start, end)))
    begun, took = read[0] - BASE_NS, np.maximum(read[1] - read[0], 0)
    numbers = np.stack((*np.divmod(begun, 1000), *np.divmod(took, 1000)), axis=1)
    body = known[alike] % tuple(numbers.reshape(-1).tolist())
    for name, text in _groups_of(job, rank).items():
        body = body.replace(name, text)
    return _head(job, rank) + body + b'\n  ],\n  "traceName": "trace.json"\n}\n'


def _likeness(job: Job, rank: int) -> bytes:
    """Equal for ranks whose traces differ only in times, groups and peers."""
    timeline = job.timeline
    calls = timeline.of_rank(timeline.calls, rank)
    names = ("kind", "sequence", "size_bytes", "step", "stream")
    columns = [calls[name].astype(np.int64) for name in names]
    same = np.diff(calls["called"], prepend=-1.0) == 0
    stage = rank // job.plan.replicas if job.plan.form in PIPELINES else 0
    return b"".join(each.tobytes() for each in (*columns, same)) + bytes((stage,))


def _pieces(job: Job, target_bytes: int | None) -> int:
    """Operators per stretch of compute, so that the text has about the requested size."""
    if target_bytes is None:
        return 3
    one, two = (len(trace_text(job, 0, pieces)) for pieces in (1, 2))
    return max(1, 1 + round((target_bytes - one) / (two - one)))


# The head


def _head(job: Job, rank: int) -> bytes:
    device = {"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_109_880_320, "numSms": 132}
    head = {
        "schemaVersion": 1,
        "deviceProperties": [device] if job.plan.backend == "nccl" else [],
        "record_shapes": 1,
        "distributedInfo": {
            "backend": job.plan.backend,
            "rank": rank,
            "world_size": job.plan.ranks,
            "pg_count": len(job.timeline.layers),
            "pg_config": [_group_facts(job, layer, rank) for layer in job.timeline.layers],
        },
        "host_name": f"node{rank // 8}",
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": BASE_NS,
    }
    lines = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    return f'{{\n{lines}  "traceEvents": [\n'.encode()


def _group_facts(job: Job, layer: Layer, rank: int) -> dict[str, Any]:
    place = int(layer.of_rank[rank])
    facts = {
        "pg_name": str(layer.first + place),
        "pg_desc": layer.description,
        "backend_config": "cuda:nccl" if job.plan.backend == "nccl" else "cpu:gloo,cuda:gloo",
        "pg_size": layer.size,
    }
    return facts | ({"ranks": layer.members[place].tolist()} if job.plan.tell_ranks else {})


def _groups_of(job: Job, rank: int) -> dict[bytes, bytes]:
    """The placeholders in a template for a rank's own groups and peers."""
    out = {}
    for number, layer in enumerate(job.timeline.layers):
        place = int(layer.of_rank[rank])
        members = layer.members[place].tolist()
        short = members if len(members) <= 30 else [*members[:30], "..."]
        listed = "[" + ", ".join(map(str, short)) + "]"
        out[f"@N{number}@".encode()] = str(layer.first + place).encode()
        out[f"@R{number}@".encode()] = (listed if job.plan.tell_ranks else "").encode()
    calls = job.timeline.of_rank(job.timeline.calls, rank)
    for number, peer in enumerate(_peers(calls)):
        out[f'"@P{number}@"'.encode()] = str(peer).encode()
    out[b'"@S@"'] = str(rank).encode()
    return out


def _peers(calls: dict[str, NDArray[Any]]) -> list[int]:
    return [peer for peer in np.unique(calls["peer"]).tolist() if peer >= 0]


# The events


def _event(category: str, name: str, pid: int, tid: int, **args: Any) -> str:
    """An event without its times, which fill four holes: µs and ns of the start and the length."""
    arguments = json.dumps({key.replace("_", " "): value for key, value in args.items()})
    return (
        f'"cat": "{category}", "name": "{name}", "pid": {pid}, "tid": {tid}, '
        f'"ts": %d.%03d, "dur": %d.%03d, "args": {arguments}'
    )


def _steps(job: Job, rank: int) -> list[_Spans]:
    timeline, plan = job.timeline, job.plan
    start = timeline.step_start[:, rank]
    ends = timeline.step_end[:, rank]
    gap = np.minimum(2e3, 0.1 * (timeline.input_end[:, rank] - start))

    def steps() -> list[str]:
        names = [f"ProfilerStep#{FIRST_STEP + step}" for step in range(plan.steps)]
        return [_event("user_annotation", name, MAIN, MAIN) for name in names]

    def loader() -> list[str]:
        return [_event("user_annotation", _LOADER, MAIN, MAIN)] * plan.steps

    return [
        _Spans(steps, start, ends - 500.0),
        _Spans(loader, start + gap, timeline.input_end[:, rank]),
    ]


def _split(table: dict[str, NDArray[Any]], pieces: int, gap_ns: float) -> tuple[Any, Any, Any]:
    """Every stretch of compute as that many operators with small gaps between them."""
    edges = np.linspace(0.0, 1.0, pieces + 1)
    took = (table["end"] - table["start"])[:, None]
    start = (table["start"][:, None] + took * edges[:-1]).reshape(-1)
    end = (table["start"][:, None] + took * edges[1:]).reshape(-1)
    end -= np.minimum(gap_ns, 0.05 * (end - start))
    return np.repeat(table["label"], pieces), start, end


def _on_cpu(job: Job, rank: int, pieces: int) -> list[_Spans]:
    """Operators on the main thread; gloo's spans on its workers, after the calls."""
    timeline = job.timeline
    label, start, end = _split(timeline.of_rank(timeline.compute, rank), pieces, 1e3)
    calls = timeline.of_rank(timeline.calls, rank)
    kinds = [KINDS[code] for code in calls["kind"].tolist()]

    def operators() -> list[str]:
        names = {"forward": "aten::addmm", "backward": "aten::mm", "optimizer": "aten::add_"}
        more = {"Input_Dims": [[1024, 1024]] * 2, "Input_type": ["float", "float"]}
        return [
            _event("cpu_op", names[LABELS[code]], MAIN, MAIN, External_id=place, **more)
            for place, code in enumerate(label.tolist(), 1)
        ]

    def call_texts() -> list[str]:
        return [
            _event("cpu_op", f"c10d::{_GLOO[kind]}", MAIN, MAIN, **_gloo_args(timeline, calls, row))
            for row, kind in enumerate(kinds)
        ]

    def spans() -> list[str]:
        return [
            _event("user_annotation", f"gloo:{_GLOO_SPAN.get(kind, kind)}", MAIN,
                   WORKER + int(calls["stream"][row]), Input_type=["float"],
                   Input_Dims=[[_given(timeline, kind, row, calls)]])
            for row, kind in enumerate(kinds)
        ]  # fmt: skip

    return [
        *_steps(job, rank),
        _Spans(operators, start, end),
        _Spans(call_texts, calls["called"], calls["called"] + 0.9 * CALL_NS["gloo"]),
        _Spans(spans, calls["start"], calls["end"]),
    ]


def _gloo_args(timeline: Timeline, calls: dict[str, NDArray[Any]], row: int) -> dict[str, Any]:
    """The output and the input of a sharded collective; the list of tensors of others."""
    kind = KINDS[calls["kind"][row]]
    given = _given(timeline, kind, row, calls)
    size = _layer_of(timeline, calls, row)[1].size
    if kind not in ("all_gather", "reduce_scatter"):
        return {
            "Input_Dims": [[[given]], [], [], []],
            "Input_type": ["TensorList", "", "", "Scalar"],
        }
    output = given * size if kind == "all_gather" else given // size
    return {"Input_Dims": [[output], [given], []], "Input_type": ["float", "float", "Scalar"]}


def _given(timeline: Timeline, kind: str, row: int, calls: dict[str, NDArray[Any]]) -> int:
    """Elements that a rank contributes: for an all-gather, its share of the total."""
    elements = int(calls["size_bytes"][row]) // 4
    return elements // _layer_of(timeline, calls, row)[1].size if kind == "all_gather" else elements


def _layer_of(timeline: Timeline, calls: dict[str, NDArray[Any]], row: int) -> tuple[int, Layer]:
    group = int(calls["group"][row])
    return next(
        (number, layer)
        for number, layer in reversed(list(enumerate(timeline.layers)))
        if group >= layer.first
    )


def _on_device(job: Job, rank: int, pieces: int) -> list[_Spans]:
    """Kernels, the operators that launch them, and NCCL's kernels on streams of their own."""
    timeline = job.timeline
    label, start, end = _split(timeline.of_rank(timeline.compute, rank), pieces, 1e3)
    names = [LABELS[code] for code in label.tolist()]
    of = {"forward": "aten::addmm", "backward": "aten::mm", "optimizer": "aten::_foreach_add_"}

    def operators() -> list[str]:
        return [
            _event("cpu_op", of[name], MAIN, MAIN, External_id=number)
            for number, name in enumerate(names, 1)
        ]

    def launches() -> list[str]:
        return [_launch(number) for number in range(1, len(names) + 1)]

    def kernels() -> list[str]:
        shape = {"grid": [132, 1, 1], "block": [128, 1, 1]}
        return [
            _event("kernel", f"sm90_xmma_gemm_f32f32_{name}", 0, STREAM, device=0, stream=STREAM,
                   correlation=number, External_id=number, **shape)
            for number, name in enumerate(names, 1)
        ]  # fmt: skip

    before = start - _BEFORE_LAUNCH_NS
    return [
        *_steps(job, rank),
        _Spans(operators, before, before + 9e3),
        _Spans(launches, before + 2e3, before + 7e3),
        _Spans(kernels, start, end),
        *_nccl(job, rank, len(names)),
    ]


def _launch(correlation: int) -> str:
    return _event("cuda_runtime", "cudaLaunchKernel", MAIN, MAIN, External_id=correlation,
                  cbid=211, correlation=correlation)  # fmt: skip


def _nccl(job: Job, rank: int, used: int) -> list[_Spans]:
    timeline = job.timeline
    calls = timeline.of_rank(timeline.calls, rank)
    kinds = [KINDS[code] for code in calls["kind"].tolist()]

    def comms() -> list[str]:
        return [
            _with_correlation(
                _event("cpu_op", "record_param_comms", MAIN, MAIN, **_nccl_args(job, calls, row)),
                used + row + 1,
            )
            for row in range(len(kinds))
        ]

    def launches() -> list[str]:
        return [_launch(used + row + 1) for row in range(len(kinds))]

    def kernels() -> list[str]:
        out = []
        for row, kind in enumerate(kinds):
            on = COMM_STREAM + int(calls["stream"][row])
            arguments = _nccl_args(job, calls, row)
            event = _event("kernel", _NCCL_KERNEL[kind], 0, on, device=0, stream=on, **arguments)
            out.append(_with_correlation(event, used + row + 1))
        return out

    host = calls["called"] - 2 * _BEFORE_LAUNCH_NS + 12e3 * _place_among_equals(calls["called"])
    return [
        _Spans(comms, host, host + 10e3),
        _Spans(launches, host + 3e3, host + 8e3),
        _Spans(kernels, calls["start"], calls["end"]),
    ]


def _place_among_equals(times: NDArray[Any]) -> NDArray[np.float64]:
    """Order calls that were made at the same time."""
    place = np.zeros(len(times))
    for row in np.flatnonzero(times[1:] == times[:-1]).tolist():
        place[row + 1] = place[row] + 1
    return place


def _with_correlation(event: str, number: int) -> str:
    return event[:-1] + f', "correlation": {number}, "External id": {number}}}'


def _nccl_args(job: Job, calls: dict[str, NDArray[Any]], row: int) -> dict[str, Any]:
    kind = KINDS[calls["kind"][row]]
    place, layer = _layer_of(job.timeline, calls, row)
    elements = int(calls["size_bytes"][row]) // 4
    arguments: dict[str, Any] = {
        "Collective_name": _NCCL_CALL[kind],
        "In_msg_nelems": elements // layer.size if kind == "all_gather" else elements,
        "Out_msg_nelems": elements // layer.size if kind == "reduce_scatter" else elements,
        "Group_size": layer.size,
        "dtype": "Float",
        "Process_Group_Name": f"@N{place}@",
        "Process_Group_Description": layer.description,
        "Process_Group_Ranks": f"@R{place}@",
    }
    if job.plan.tell_sequence:
        arguments["Seq"] = int(calls["sequence"][row])
    if kind == "send":
        arguments |= {"Src_Rank": "@S@", "Dst_Rank": _peer(calls, row)}
    elif kind in ("recv", "broadcast"):
        arguments |= {"Src_Rank": _peer(calls, row), "Dst_Rank": "@S@"}
    return arguments


def _peer(calls: dict[str, NDArray[Any]], row: int) -> str:
    return f"@P{_peers(calls).index(int(calls['peer'][row]))}@"


# Files next to a trace


def _write_beside(home: Path, job: Job, rank: int) -> None:
    plan = job.plan
    part = job.parts[rank]
    (home / "rank.json").write_text(json.dumps(_rank_file(job, rank)))
    if part.rounds:
        syncs = [
            {
                "label": each.label,
                "step": each.step,
                "rounds": np.stack((each.came_ns, each.left_ns), axis=1).tolist(),
                "clock": "unix_ns",
                "offset_perf_to_unix_ns": 0,
            }
            for each in part.rounds
        ]
        clock = {"schema": 1, "rank": rank, "world_size": plan.ranks, "syncs": syncs, "notes": []}
        (home / "clock.json").write_text(json.dumps(clock))
    (home / "steps.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in _steps_file(job, rank))
    )
    if plan.backend == "gloo":
        lines = "".join(f"{json.dumps(row)}\n" for row in _comms_file(job, rank))
        (home / "comms.jsonl").write_text(lines)


def _rank_file(job: Job, rank: int) -> dict[str, Any]:
    groups = [
        {
            "name": str(layer.first + int(layer.of_rank[rank])),
            "description": layer.description,
            "backend": job.plan.backend,
            "size": layer.size,
            "rank": layer.members[layer.of_rank[rank]].tolist().index(rank),
            "ranks": sorted(layer.members[layer.of_rank[rank]].tolist()),
        }
        for layer in job.timeline.layers
    ]
    return {
        "schema": 1,
        "rank": rank,
        "world_size": job.plan.ranks,
        "status": "finished",
        "steps": FIRST_STEP + job.plan.steps + 5,
        "skipped": 0,
        "argv": ["train.py"],
        "communication": {"groups": groups, "ddp": [], "placements": [], "notes": []},
        "problems": [],
        "host": f"node{rank // 8}",
        "pid": MAIN,
        "python": "3.12.3",
        "torch": "2.13.0",
        "device": None,
    }


def _steps_file(job: Job, rank: int) -> list[dict[str, Any]]:
    """The window's steps, and as many slightly faster ones before it, without the profiler."""
    timeline = job.timeline
    took = timeline.step_end[:, rank] - timeline.step_start[:, rank]
    loading = timeline.input_end[:, rank] - timeline.step_start[:, rank]
    end = job.clocks.read(rank, timeline.step_end[:, rank])
    rows = []
    for number in range(FIRST_STEP + job.plan.steps):
        inside = number >= FIRST_STEP
        place = number - FIRST_STEP if inside else number % job.plan.steps
        wall = round(float(took[place]) * (1.0 if inside else 0.98))
        rows.append(_step_row(number, wall, round(float(loading[place])), int(end[place]), inside))
    return rows


def _step_row(number: int, wall: int, data: int, end: int, inside: bool) -> dict[str, Any]:
    rest = max(0, wall - data)
    row: dict[str, Any] = {
        "step": number,
        "wall_ns": wall,
        "data_ns": wall - rest,
        "forward_ns": rest // 3,
        "backward_ns": rest - rest // 3 - rest // 20,
        "optimizer_ns": rest // 20,
        "other_ns": 0,
        "end_unix_ns": end if inside else end - (FIRST_STEP - number) * wall,
        "window": inside,
    }
    return row | ({"first": True} if number == 0 else {})


def _comms_file(job: Job, rank: int) -> list[dict[str, Any]]:
    """The flight recorder's lines; gloo's sends and receives are not in it."""
    timeline = job.timeline
    calls = timeline.of_rank(timeline.calls, rank)
    created = job.clocks.read(rank, calls["called"] + 0.4 * CALL_NS["gloo"]).tolist()
    rows = []
    for row, code in enumerate(calls["kind"].tolist()):
        kind = KINDS[code]
        if kind in ("send", "recv"):
            continue
        _, layer = _layer_of(timeline, calls, row)
        rows.append(
            {
                "kind": kind,
                "group": str(int(calls["group"][row])),
                "group_description": layer.description,
                "group_size": layer.size,
                "sequence": int(calls["sequence"][row]) if job.plan.tell_sequence else None,
                "p2p": False,
                "size_bytes": int(calls["size_bytes"][row]),
                "dtype": "float32",
                "created_ns": created[row],
                "step": FIRST_STEP + int(calls["step"][row]),
                "name": f"gloo:{kind}",
                "source": "flight recorder",
            }
        )
    return rows
