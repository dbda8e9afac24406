"""What definitions.md says, computed as slowly and plainly as it can be said.

Nothing here comes from stepscope: json, exact decimals, Python integers, one sweep over sorted
edges. It is the second opinion that test_reference.py holds every real trace against.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

KERNEL = {"kernel"}
COPY = {"gpu_memcpy", "gpu_memset", "memcpy", "memset"}
RUNTIME = {"cuda_runtime", "cuda_driver", "hip_runtime", "runtime"}
COMM_KERNEL = re.compile("nccl|rccl|hccl|oneccl|cross_device_reduce", re.IGNORECASE)
ROCM_COPY = re.compile("__amd_rocclr_(copy|fill)")
COMM_SPAN = re.compile("(gloo:|nccl:|mpi:|ucc:|c10d::|_c10d_functional::)|record_param_comms$")
LAUNCH_LATENCY_NS = 30_000


@dataclass(frozen=True)
class Work:
    """One piece of the device's work."""

    start: int
    end: int
    kind: str
    name: str
    launched: int | None  # when the host's launch call began


@dataclass(frozen=True)
class Account:
    """Where one rank's time went."""

    timeline_ns: dict[str, int]
    idle_ns: dict[str, int]
    comm_ns: int
    memory_ns: int
    hidden_comm_ns: int
    kernels: dict[tuple[str, str], tuple[int, int]]  # (name, kind) -> (count, total ns)
    unlinked: int


def account_for(path: Path) -> Account:
    """The whole account of a Kineto file."""
    events = load(path)
    work = device_work(events)
    if work:
        return _account(work, idle_of(work), per_name(work), sum(w.launched is None for w in work))
    spans, own = host_work(events)
    gaps = sum(end - start for start, end, _ in gaps_of(spans))
    return _account(spans, {"host": gaps, "launch": 0, "other": 0}, own, 0)


def load(path: Path) -> list[dict[str, Any]]:
    """Complete events with exact times: `start` and `end` in whole nanoseconds."""
    text = path.read_bytes()
    if path.suffix == ".gz":
        text = gzip.decompress(text)
    content = json.loads(text, parse_float=Decimal)
    base = int(content.get("baseTimeNanoseconds", 0))
    events = []
    for event in content["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") != "Trace":
            start = base + _ns(event["ts"])
            events.append(event | {"start": start, "end": start + _ns(event["dur"])})
    return events


def _ns(microseconds: Any) -> int:
    exact = Decimal(microseconds) * 1000
    assert exact == exact.to_integral_value(), microseconds
    return int(exact)


def device_work(events: list[dict[str, Any]]) -> list[Work]:
    """Every kernel, copy and memset, in the order they ran."""
    launched: dict[int, int] = {}
    for event in events:
        if event["cat"].lower() in RUNTIME and "correlation" in event["args"]:
            key = event["args"]["correlation"]
            launched[key] = min(launched.get(key, event["start"]), event["start"])
    work = [
        Work(
            start=event["start"],
            end=event["end"],
            kind=_kind(event),
            name=event["name"],
            launched=launched.get(event["args"]["correlation"]),
        )
        for event in events
        if event["cat"].lower() in KERNEL | COPY
    ]
    return sorted(work, key=lambda each: (each.start, each.end))


def _kind(event: dict[str, Any]) -> str:
    if event["cat"].lower() in COPY:
        return "memory"
    if COMM_KERNEL.search(event["name"]):
        return "comm"
    return "memory" if ROCM_COPY.match(event["name"]) else "compute"


def host_work(
    events: list[dict[str, Any]],
) -> tuple[list[Work], dict[tuple[str, str], tuple[int, int]]]:
    """The CPU as the device: each thread's operators, less the communication inside them.

    A thread's time belongs to its innermost operator or communication span; what a communication
    span holds is communication, down to the last operator in it.
    """
    lanes = defaultdict(list)
    for event in events:
        if event["cat"] == "cpu_op" or (
            event["cat"] == "user_annotation" and COMM_SPAN.match(event["name"])
        ):
            lanes[event["pid"], event["tid"]].append(event)
    pieces: list[Work] = []
    own: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for lane in lanes.values():
        cuts = [event for event in lane if COMM_SPAN.match(event["name"])]
        around: list[tuple[dict[str, Any], str]] = []
        for event in sorted(lane, key=lambda e: (e["start"], -e["end"])):
            while around and around[-1][0]["end"] < event["end"]:
                around.pop()
            kind = "comm" if event in cuts or (around and around[-1][1] == "comm") else "compute"
            own[event["name"], kind][0] += 1
            own[event["name"], kind][1] += event["end"] - event["start"]
            if around:
                own[around[-1][0]["name"], around[-1][1]][1] -= event["end"] - event["start"]
            around.append((event, kind))
            pieces += [
                Work(start=start, end=end, kind=kind, name=event["name"], launched=None)
                for start, end in _without(
                    event["start"], event["end"], cuts if kind == "compute" else []
                )
            ]
    pieces.sort(key=lambda each: (each.start, each.end))
    return pieces, {key: (count, total) for key, (count, total) in own.items()}


def _without(start: int, end: int, cuts: list[dict[str, Any]]) -> list[tuple[int, int]]:
    pieces = []
    for cut in sorted(cuts, key=lambda e: e["start"]):
        if start < cut["end"] and cut["start"] < end:
            if start < cut["start"]:
                pieces.append((start, cut["start"]))
            start = max(start, cut["end"])
    return [*pieces, (start, end)] if start < end else pieces


def gaps_of(work: list[Work]) -> list[tuple[int, int, Work]]:
    """(start, end, the work that ended it) of every gap on the merged line."""
    gaps = []
    reach = work[0].end
    for each in work:
        if each.start > reach:
            gaps.append((reach, each.start, each))
        reach = max(reach, each.end)
    return gaps


def idle_of(work: list[Work]) -> dict[str, int]:
    """host: nothing was queued; launch: queued and short; other: queued and long."""
    idle = {"host": 0, "launch": 0, "other": 0}
    for start, end, following in gaps_of(work):
        if following.launched is not None and following.launched > start:
            idle["host"] += end - start
        elif end - start < LAUNCH_LATENCY_NS:
            idle["launch"] += end - start
        else:
            idle["other"] += end - start
    return idle


def per_name(work: list[Work]) -> dict[tuple[str, str], tuple[int, int]]:
    """Count and total time by name and kind."""
    out: dict[tuple[str, str], tuple[int, int]] = {}
    for each in work:
        count, total = out.get((each.name, each.kind), (0, 0))
        out[each.name, each.kind] = (count + 1, total + each.end - each.start)
    return out


def _account(
    work: list[Work],
    idle: dict[str, int],
    kernels: dict[tuple[str, str], tuple[int, int]],
    unlinked: int,
) -> Account:
    """One walk along all edges, with a count of what is running of each kind."""
    edges = sorted(
        [(each.start, 1, each.kind) for each in work] + [(each.end, -1, each.kind) for each in work]
    )
    running = {"compute": 0, "comm": 0, "memory": 0}
    time = dict.fromkeys(("compute", "exposed_comm", "exposed_memory", "idle"), 0)
    comm = memory = hidden = 0
    before = edges[0][0]
    for now, change, kind in edges:
        passed, before = now - before, now
        comm += passed if running["comm"] else 0
        memory += passed if running["memory"] else 0
        hidden += passed if running["comm"] and running["compute"] else 0
        if running["compute"]:
            time["compute"] += passed
        elif running["comm"]:
            time["exposed_comm"] += passed
        elif running["memory"]:
            time["exposed_memory"] += passed
        else:
            time["idle"] += passed
        running[kind] += change
    return Account(
        timeline_ns={"span": edges[-1][0] - edges[0][0], **time},
        idle_ns=idle,
        comm_ns=comm,
        memory_ns=memory,
        hidden_comm_ns=hidden,
        kernels=kernels,
        unlinked=unlinked,
    )
