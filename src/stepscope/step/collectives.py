"""One rank's collectives: call by call, to be matched with those of other ranks, and summed
by kind, group and size. Their time includes waiting for other ranks.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.records.dtypes import LOWER_CASE_BYTES
from stepscope.records.explanation import Collective, Steps
from stepscope.records.job import KINDS, CollectiveCalls, Group, RankFolder
from stepscope.records.trace import ABSENT, CollectiveArgs, HostKind, Trace
from stepscope.step import call_tree, intervals
from stepscope.step.arrays import Indices, Int32s, Int64s
from stepscope.step.steps import step_of
from stepscope.step.work import Kind, Work, rows_named
from stepscope.text.words import lazy_pattern
from stepscope.trace.links import nearest_of

_CODE = {name: code for code, name in enumerate(KINDS)}
_VAGUE = ("send_recv", "other")
_BY_SECOND_INPUT = ("all_gather", "reduce_scatter", "all_to_all")
_COMM_CALL = re.compile(r"^(?:c10d::|nccl:|_c10d_functional::)")
_OF_C10D = re.compile(r"^c10d::")


class _CallFacts(NamedTuple):
    kind: str
    group: Group
    size_bytes: int | None
    sequence: int = ABSENT
    peer: int = ABSENT


def list_calls(
    trace: Trace, work: Work, steps: Steps, folder: RankFolder | None = None
) -> tuple[CollectiveCalls, Int32s]:
    """All collectives in the order of arrival, and the host event of each call (or ABSENT)."""
    rows = np.flatnonzero(work.kind == Kind.COMM)
    if work.on_host:  # c10d:: calls only start the work, which gloo: spans then do
        rows = rows[trace.host.kind[work.rows[rows]] == HostKind.ANNOTATION]
        facts, row = _read_spans(trace, work.rows[rows], folder)
    else:
        facts, row = _read_kernels(trace, work.rows[rows])
    start, end = work.start_ns[rows], work.end_ns[rows]
    called_ns = start
    if len(trace.host):
        called_ns = np.where(row >= 0, trace.host.start_ns[np.maximum(row, 0)], start)
    arrival = called_ns if work.on_host else start
    by_host = (row >= 0) | work.on_host
    groups = list(dict.fromkeys(call.group for call in facts))
    number = {group: place for place, group in enumerate(groups)}
    order = np.argsort(arrival, kind="stable")

    def column(values: list[int], kind: Any) -> NDArray[Any]:
        return np.array(values, kind)[order]

    calls = CollectiveCalls(
        groups=tuple(groups),
        kind=column([_CODE[call.kind] for call in facts], np.int8),
        group=column([number[call.group] for call in facts], np.int32),
        sequence=column([call.sequence for call in facts], np.int64),
        size_bytes=column(
            [ABSENT if call.size_bytes is None else call.size_bytes for call in facts], np.int64
        ),
        peer=column([call.peer for call in facts], np.int32),
        step=np.where(by_host, _steps_at(steps, called_ns), _cycles_at(steps, start))[order],
        arrival_ns=arrival[order],
        start_ns=start[order],
        end_ns=end[order],
        exposed_ns=exposed_time(work, start, end)[order],
    )
    return calls, row[order]


def exposed_time(work: Work, start: Int64s, end: Int64s) -> Int64s:
    """The part of each call without simultaneous compute. When several calls run at once, the time
    counts for the first one, so that the calls add up to their common exposed time."""
    order = np.argsort(start, kind="stable")
    done = np.maximum.accumulate(end[order])
    began = start.copy()
    began[order[1:]] = np.maximum(start[order[1:]], done[:-1])
    began = np.minimum(began, end)
    exposed: Int64s = end - began - intervals.covered(work.compute, began, end)
    return exposed


def _steps_at(steps: Steps, called_ns: Int64s) -> Int32s:
    """The compared step (see rank_part.py) of each call, by the host time of the call."""
    if not steps.cycles_ns:
        return np.zeros(len(called_ns), np.int32)
    place = step_of(steps.steps, called_ns) - steps.first_cycle
    return np.where((place >= 0) & (place < len(steps.cycles_ns)), place, ABSENT).astype(np.int32)


def _cycles_at(steps: Steps, start: Int64s) -> Int32s:
    """The same for calls without a recorded launch, by their start on the device."""
    edges = steps.window_start_ns + np.append(0, np.cumsum(steps.cycles_ns)).astype(np.int64)
    if len(edges) < 2:
        return np.zeros(len(start), np.int32)
    place = np.searchsorted(edges, start, side="right") - 1
    inside = (place >= 0) & (place < len(edges) - 1)
    return np.where(inside, place, ABSENT).astype(np.int32)


# A device's kernels: metadata on the kernel itself, else on the call around its launch.


def _read_kernels(trace: Trace, at: Indices) -> tuple[list[_CallFacts], Int32s]:
    if not len(at):
        return [], np.empty(0, np.int32)
    device, host = trace.device, trace.host
    own, launch = device.collective[at], device.launch[at]
    calls = np.full((3, len(at)), ABSENT, np.int32)  # name, shapes, dtypes of the call around it
    if len(host):
        around = nearest_of(host, host.collective >= 0, launch)
        known = (around >= 0) & (own < 0)
        own = np.where(known, host.collective[np.maximum(around, 0)], own)
        calling = rows_named(trace, host, host.kind <= HostKind.ANNOTATION, _shows_kind)
        call = nearest_of(host, calling, launch)
        for row, column in enumerate((host.name, host.shapes, host.dtypes)):
            calls[row] = np.where(call >= 0, column[np.maximum(call, 0)], ABSENT)
    recorded = np.stack((device.name[at], own, *calls))
    first, inverse, _ = call_tree.group(*recorded)
    facts = [_from_kernel(trace, *codes) for codes in recorded[:, first].T.tolist()]
    return [facts[i] for i in inverse.tolist()], launch.astype(np.int32)


def _shows_kind(name: str) -> bool:
    return bool(_COMM_CALL.match(name)) and kind_of(name) not in _VAGUE


def _from_kernel(
    trace: Trace, name: int, metadata: int, call: int, shapes: int, dtypes: int
) -> _CallFacts:
    """A kernel name that sends, receives and all-to-alls share needs the name of the call."""
    args = trace.collectives[metadata] if metadata >= 0 else None
    kind = kind_of(args.name if args else trace.strings[name])
    if kind in _VAGUE and call >= 0:
        kind = kind_of(trace.strings[call])
    if args:
        # The group that the call names; its ranks from the call, else from the file's
        # list.
        listed = _listed_group(trace, args.group)
        group = Group(
            name=args.group,
            description=args.group_description or str(listed.get("pg_desc", "")),
            size=max(args.group_size, 0) or None,
            ranks=_integers(args.group_ranks) or tuple(listed.get("ranks") or ()),
        )
        return _CallFacts(kind, group, size_bytes(args), args.sequence, _peer(args))
    group = _default_group(trace) if call >= 0 else Group(name="")
    return _CallFacts(kind, group, _given_bytes(trace, kind, group, shapes, dtypes))


def _listed_group(trace: Trace, name: str) -> dict[str, Any]:
    return next((group for group in trace.groups if group.get("pg_name") == name), {})


def _integers(text: str) -> tuple[int, ...]:
    """A list as the profiler writes it; it cuts long ones, which are then unknown."""
    try:
        return tuple(msgspec.json.decode(text, type=list[int])) if text else ()
    except msgspec.DecodeError:
        return ()


def _peer(args: CollectiveArgs) -> int:
    kind = kind_of(args.name)
    if kind == "send":
        return args.destination_rank
    return args.source_rank if kind in ("recv", "broadcast") else ABSENT


# The CPU: gloo's spans know sizes; the calls before them, when; the flight recorder, the group.


def _read_spans(
    trace: Trace, spans: Indices, folder: RankFolder | None
) -> tuple[list[_CallFacts], Int32s]:
    host = trace.host
    row = find_callers(trace, spans)
    known = row >= 0
    names = np.where(known, host.name[np.maximum(row, 0)], host.name[spans])
    lines = folder.comms if folder else ()
    # The flight recorder's line that was created during each call.
    line_of = np.full(len(row), ABSENT, np.intp)
    created = np.array([line.get("created_ns") or ABSENT for line in lines], np.int64)
    order = np.argsort(created, kind="stable")
    called_ns = host.start_ns[np.maximum(row, 0)]
    ended = called_ns + host.dur_ns[np.maximum(row, 0)]
    place = np.searchsorted(created[order], called_ns)
    for i in np.flatnonzero((row >= 0) & (place < len(order))).tolist():
        if created[order[place[i]]] <= ended[i]:
            line_of[i] = order[place[i]]
    default = _default_group(trace)
    columns = np.stack((names, host.shapes[spans], host.dtypes[spans], line_of), axis=1)
    facts = [
        _from_span(trace, name, shapes, dtypes, lines[place] if place >= 0 else None, default)
        for name, shapes, dtypes, place in columns.tolist()
    ]
    return facts, row


def find_callers(trace: Trace, spans: Indices) -> Int32s:
    """The c10d:: operator that started each gloo span: by kind and number of elements, in order."""
    host = trace.host
    row = np.full(len(spans), ABSENT, np.int32)
    calls = np.flatnonzero(rows_named(trace, host, host.kind == HostKind.OPERATOR, _OF_C10D.match))
    calls = calls[np.argsort(host.start_ns[calls], kind="stable")]
    keys: dict[tuple[str, int], int] = {}
    span_key = _keys(trace, spans, keys, calling=False)
    call_key = _keys(trace, calls, keys, calling=True)
    for key in range(len(keys)):
        mine, called_ns = np.flatnonzero(span_key == key), calls[call_key == key]
        if not len(mine) or not len(called_ns):
            continue
        mine = mine[np.argsort(host.start_ns[spans[mine]], kind="stable")]
        # spans of calls before the window come first: none begins before its call
        begun = host.start_ns[spans[mine]]
        early = np.searchsorted(begun, host.start_ns[called_ns]) - np.arange(len(called_ns))
        skip = max(0, int(early.max()))
        pairs = max(0, min(len(called_ns), len(mine) - skip))
        row[mine[skip : skip + pairs]] = called_ns[:pairs]
    return row


def _keys(
    trace: Trace, rows: NDArray[Any], keys: dict[tuple[str, int], int], *, calling: bool
) -> Indices:
    """Numbers for pairs of kind and element count; each distinct recording is parsed once."""
    host = trace.host
    pairs = np.stack((host.name[rows], host.shapes[rows]))
    first, inverse, _ = call_tree.group(*pairs)
    facts = [_key(trace, name, shapes, calling) for name, shapes in pairs[:, first].T.tolist()]
    numbers = [keys.setdefault(key, len(keys)) for key in facts]
    return np.array(numbers, np.intp)[inverse]


def _key(trace: Trace, name: int, shapes: int, calling: bool) -> tuple[str, int]:
    kind = kind_of(trace.strings[name])
    family = "all_reduce" if kind == "reduce_scatter" else kind
    if shapes < 0:
        return family, 0
    try:
        inputs = msgspec.json.decode(trace.strings[shapes], type=list[Any])
    except msgspec.DecodeError:
        return family, 0
    if not calling:
        return family, count_elements(inputs)
    second = kind in _BY_SECOND_INPUT and len(inputs) > 1
    return family, count_elements(inputs[1] if second else inputs[0]) if inputs else 0


def count_elements(shape: Any) -> int:
    """Elements of a tensor with this shape, or of all tensors in a list of shapes."""
    if not isinstance(shape, list) or not shape:
        return 0
    if any(isinstance(part, list) for part in shape):
        return sum(count_elements(part) for part in shape)
    return math.prod(part for part in shape if isinstance(part, int))


def _from_span(
    trace: Trace, name: int, shapes: int, dtypes: int, line: dict[str, Any] | None, default: Group
) -> _CallFacts:
    kind = kind_of(trace.strings[name])
    group = default if line is None else _line_group(trace, line)
    size = line.get("size_bytes") if line else None
    if size is None:
        size = _given_bytes(trace, kind, group, shapes, dtypes)
    sequence = line.get("sequence") if line else None
    return _CallFacts(kind, group, size, ABSENT if sequence is None else int(sequence))


def _line_group(trace: Trace, line: dict[str, Any]) -> Group:
    name = str(line.get("group", ""))
    listed = _listed_group(trace, name)
    return Group(
        name=name,
        description=str(line.get("group_description") or listed.get("pg_desc", "")),
        size=line.get("group_size") or listed.get("pg_size"),
        ranks=tuple(listed.get("ranks") or ()),
    )


def _default_group(trace: Trace) -> Group:
    """gloo spans do not name their group: the only group, else one of the groups' common size."""
    if len(trace.groups) == 1:
        return _line_group(trace, {"group": trace.groups[0].get("pg_name", "")})
    sizes = {group.get("pg_size") for group in trace.groups} or {trace.world_size}
    size = sizes.pop()
    known = not sizes and isinstance(size, int) and size > 0
    return Group(name="", size=size if known else None)


def _given_bytes(trace: Trace, kind: str, group: Group, shapes: int, dtypes: int) -> int | None:
    """The record holds this rank's input; an all-gather's size is the output of all ranks."""
    size = _span_bytes(trace, shapes, dtypes)
    if kind != "all_gather" or size is None:
        return size
    return size * group.size if group.size else None


def _span_bytes(trace: Trace, shapes: int, dtypes: int) -> int | None:
    if shapes < 0 or dtypes < 0:
        return None
    try:
        dims = msgspec.json.decode(trace.strings[shapes], type=list[list[int]])
        names = msgspec.json.decode(trace.strings[dtypes], type=list[str])
    except msgspec.DecodeError:
        return None
    pairs = zip(dims, names, strict=False)
    return (
        sum(LOWER_CASE_BYTES.get(name.lower(), 0) * math.prod(dim) for dim, name in pairs) or None
    )


# Collectives of one rank by kind, group and size. Their time includes waiting for other ranks.

_KINDS = (
    (lazy_pattern(r"all_?reduce|cross_device_reduce", re.I), "all_reduce"),
    (lazy_pattern(r"all_?gather", re.I), "all_gather"),
    (lazy_pattern(r"reduce_?scatter", re.I), "reduce_scatter"),
    (lazy_pattern(r"all_?to_?all", re.I), "all_to_all"),
    (lazy_pattern(r"broadcast", re.I), "broadcast"),
    (lazy_pattern(r"barrier", re.I), "barrier"),
    (lazy_pattern(r"send_?recv", re.I), "send_recv"),
    (lazy_pattern(r"send", re.I), "send"),
    (lazy_pattern(r"recv|receive", re.I), "recv"),
    (lazy_pattern(r"gather", re.I), "gather"),
    (lazy_pattern(r"scatter", re.I), "scatter"),
    (lazy_pattern(r"reduce", re.I), "reduce"),
)


def kind_of(name: str) -> str:
    """The collective's name in our vocabulary, from any library's kernel or call name."""
    return next((kind for pattern, kind in _KINDS if pattern.search(name)), "other")


def bus_factor(kind: str, ranks: int) -> float:
    """busbw = algbw x this."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


def list_collectives(calls: CollectiveCalls) -> tuple[Collective, ...]:
    """Longest total first."""
    if not len(calls):
        return ()
    _, inverse, count = call_tree.group(calls.kind, calls.group, calls.size_bytes)
    out = [_summarise(calls, np.flatnonzero(inverse == code)) for code in range(count)]
    return tuple(sorted(out, key=lambda collective: -collective.total_ns))


def size_bytes(args: CollectiveArgs) -> int | None:
    """Total bytes: the output of an all-gather, the input of everything else."""
    width = LOWER_CASE_BYTES.get(args.dtype.lower())
    elements = args.out_elements if kind_of(args.name) == "all_gather" else args.in_elements
    return elements * width if width and elements >= 0 else None


def _summarise(calls: CollectiveCalls, rows: Indices) -> Collective:
    """Calls of one kind, group and size as one row."""
    kind, size = KINDS[calls.kind[rows[0]]], int(calls.size_bytes[rows[0]])
    group = calls.groups[calls.group[rows[0]]]
    start, end = calls.start_ns[rows], calls.end_ns[rows]
    total = int((end - start).sum())
    algbw = size * len(rows) / total if size >= 0 and total else None
    ranks = group.size
    return Collective(
        kind=kind,
        group=group.name,
        group_size=group.size,
        size_bytes=size if size >= 0 else None,
        count=len(rows),
        total_ns=total,
        exposed_ns=int(calls.exposed_ns[rows].sum()),
        algbw_gb_s=algbw,
        busbw_gb_s=algbw * bus_factor(kind, ranks) if algbw is not None and ranks else None,
    )
