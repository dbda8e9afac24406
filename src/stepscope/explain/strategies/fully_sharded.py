"""Sharded parameters: gathers and scatters of every block, their prefetching, the memory.

FSDP annotates its own work (FSDP2 with the block's name). Gathers and scatters in one group without
an annotation are reported as ZeRO. The formula counts mixed-precision Adam: 16 bytes per parameter.
"""

from __future__ import annotations

import re

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.explain.memory.model import STAGES, bytes_per_parameter
from stepscope.explain.strategies.evidence import (
    Bools,
    Int32,
    Int64,
    StrategyEvidence,
    common_size,
    compute_before,
    mean,
)
from stepscope.records.dtypes import LOWER_CASE_BYTES
from stepscope.records.job import KINDS
from stepscope.records.memory import CapturedMemory
from stepscope.records.strategies import (
    Flavour,
    Operation,
    RankFullySharded,
    ShardedBlock,
    ShardMemory,
)
from stepscope.records.trace import HostKind
from stepscope.step.collectives import kind_of
from stepscope.step.work import rows_named
from stepscope.text.words import counted
from stepscope.trace.links import distinct, nearest_of

_FSDP2 = "FSDP::"
_ANNOTATED = re.compile(r"FullyShardedDataParallel\.|FSDP::").match
FUNCTIONAL = re.compile("_c10d_functional::").match
_NAME = re.compile(r"^FSDP::\w+(?: for)? \(?(.+?)\)?$")
_COPY_OUT = re.compile(r"^FSDP::all_gather_copy_out")
_OPERATIONS: dict[str, Operation] = {
    "all_gather": "gather",
    "reduce_scatter": "scatter",
    "all_reduce": "all_reduce",
}
_AT_REST = ("optimizer", "begin")  # phases that end with nothing gathered
ROOT = "(root)"


def find(evidence: StrategyEvidence, free: Bools) -> tuple[RankFullySharded | None, Bools]:
    """Calls inside FSDP's annotations, else groups that gather and scatter."""
    around = evidence.inside(_ANNOTATED)
    free = free & (evidence.inside(FUNCTIONAL) < 0)
    mine = free & (around >= 0) & evidence.of_kind(*_OPERATIONS)
    annotated = bool(mine.any())
    if not annotated:
        mine = free & _gathering_and_scattering(evidence, free)
        if not mine.any():
            return None, mine
        around = np.full(len(evidence), -1, np.int32)
    names = _names(evidence, around, mine)
    blocks, prefetched = _blocks(evidence, mine, names)
    gathers = evidence.of_kind("all_gather")
    reduces = evidence.of_kind("all_reduce")
    groups = evidence.groups_of(mine & ~reduces) or evidence.groups_of(mine)
    second = any(_FSDP2 in name for name in _annotations(evidence, around, mine).values())
    flavour: Flavour = "FSDP2" if second else "FSDP1" if annotated else "ZeRO"
    in_step = (mine & gathers).any() and (annotated or not _only_after_backward(evidence, mine))
    shards = groups[0].size if groups else None
    out = [
        f"{counted(count, 'module')} of class {name}"
        for name, count in (evidence.layout.get("fsdp_modules") or {}).items()
    ]
    if annotated:
        out.append("FSDP annotates its gathers and scatters")
    return RankFullySharded(
        flavour=flavour,
        stage=3 if in_step else 2 if (mine & evidence.of_kind("reduce_scatter")).any() else 1,
        groups=groups,
        replicate_groups=evidence.groups_of(mine & reduces) if (mine & ~reduces).any() else (),
        evidence=tuple(out) or ("gathers and scatters in one group",),
        step_ns=evidence.step_ns,
        comm_ns=evidence.comm_ns(mine),
        exposed_ns=evidence.exposed_comm_ns(mine),
        blocks=blocks,
        prefetched_share=prefetched,
        memory=_memory(evidence, mine & gathers, names, shards),
    ), mine


def fsdp_groups(evidence: StrategyEvidence) -> set[str]:
    """Names of the groups of FSDP's annotated calls."""
    mine = (evidence.inside(_ANNOTATED) >= 0) & (evidence.inside(FUNCTIONAL) < 0)
    return {group.name for group in evidence.groups_of(mine)}


def _annotations(evidence: StrategyEvidence, around: Int32, mine: Bools) -> dict[int, str]:
    """String codes and names of the annotations around these calls."""
    codes = distinct(evidence.trace.host.name[around[mine & (around >= 0)]]).tolist()
    return {code: evidence.trace.strings[code] for code in codes}


def _gathering_and_scattering(evidence: StrategyEvidence, free: Bools) -> Bools:
    gathers, scatters = (free & evidence.of_kind(k) for k in ("all_gather", "reduce_scatter"))
    both = set(evidence.group[gathers].tolist()) & set(evidence.group[scatters].tolist())
    return (gathers | scatters) & np.isin(evidence.group, list(both))


def _only_after_backward(evidence: StrategyEvidence, mine: Bools) -> bool:
    """Whether all gathers follow the last scatter of their step: they share updated weights."""
    gathers, scatters = (mine & evidence.of_kind(k) for k in ("all_gather", "reduce_scatter"))
    last = np.full(len(evidence.pace), -1, np.int64)
    np.maximum.at(last, evidence.step[scatters], evidence.made_ns[scatters])
    return bool((evidence.made_ns[gathers] > last[evidence.step[gathers]]).all())


class _BlockNames(msgspec.Struct, frozen=True):
    """The block of each call, as a number into `words`."""

    words: list[str]
    code: NDArray[np.intp]


def _names(evidence: StrategyEvidence, around: Int32, mine: Bools) -> _BlockNames:
    """As annotated, else by the place among calls of its kind in the step."""
    calls = np.flatnonzero(mine)
    code = np.zeros(len(evidence), np.intp)
    annotations = _annotations(evidence, around, mine)
    if any(name.startswith(_FSDP2) for name in annotations.values()):
        words = list(dict.fromkeys(_block_name(name) for name in annotations.values()))
        number = {key: words.index(_block_name(name)) for key, name in annotations.items()}
        names = evidence.trace.host.name[around[calls]].tolist()
        code[calls] = [number[name] for name in names]
        return _BlockNames(words, code)
    order = np.lexsort((evidence.made_ns[calls], evidence.step[calls], evidence.kind[calls]))
    calls = calls[order]
    key = evidence.kind[calls].astype(np.int64) * (len(evidence.pace) + 1) + evidence.step[calls]
    opens = np.flatnonzero(np.diff(key, prepend=key[:1] - 1))
    place = np.arange(len(calls)) - np.repeat(opens, np.diff(np.append(opens, len(calls))))
    code[calls] = place
    return _BlockNames([f"#{number}" for number in range(int(place.max()) + 1)], code)


def _block_name(annotation: str) -> str:
    match = _NAME.match(annotation)
    return match[1] if match else ROOT


def _blocks(
    evidence: StrategyEvidence, mine: Bools, names: _BlockNames
) -> tuple[tuple[ShardedBlock, ...], float | None]:
    """In the step's order, and the share of gathers that are prefetched."""
    gathers = np.flatnonzero(mine & evidence.of_kind("all_gather"))
    lead = np.zeros(len(evidence), np.int64)
    lead[gathers] = _leads(evidence, gathers, names)
    opening = np.zeros(len(evidence), np.bool_)
    # The first gather of each step's forward and backward: no compute could hide it.
    key = evidence.step[gathers].astype(np.int64) * 2 + evidence.backward[gathers]
    opening[gathers[np.flatnonzero(np.diff(key, prepend=key[:1] - 1))]] = True
    calls = np.flatnonzero(mine)
    keys = np.stack((names.code[calls], evidence.kind[calls], evidence.backward[calls]), axis=1)
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    out = [
        _block(evidence, names, calls[inverse.reshape(-1) == place], lead, opening)
        for place in np.argsort(first, kind="stable").tolist()
    ]
    judged = gathers[~opening[gathers]]
    share = float((lead[judged] > 0).mean()) if len(judged) else None
    return tuple(out), share


def _block(
    evidence: StrategyEvidence,
    names: _BlockNames,
    at: NDArray[np.intp],
    lead: Int64,
    opening: Bools,
) -> ShardedBlock:
    """Calls of one block, operation and phase."""
    operation = _OPERATIONS[KINDS[evidence.kind[at[0]]]]
    ahead = mean(lead[at]) if operation == "gather" else None
    return ShardedBlock(
        name=names.words[names.code[at[0]]],
        operation=operation,
        phase="backward" if evidence.backward[at[0]] else "forward",
        count=len(at) / evidence.steps,
        size_bytes=common_size(evidence.size_bytes[at]),
        **evidence.times_per_step(at),
        lead_ns=ahead,
        prefetched=None if ahead is None or opening[at].all() else ahead > 0,
    )


def _leads(evidence: StrategyEvidence, gathers: NDArray[np.intp], names: _BlockNames) -> Int64:
    """How long a gather began before the compute that precedes its block ended.

    Compute precedes a block if it was launched before the block's parameters were copied out (FSDP2
    annotates that) or, if unknown, before the gather was called.
    """
    used = evidence.made_ns[gathers].copy()
    trace, host = evidence.trace, evidence.trace.host
    rows = np.flatnonzero(
        rows_named(trace, host, host.kind == HostKind.ANNOTATION, _COPY_OUT.match)
    )
    rows = rows[np.argsort(host.start_ns[rows], kind="stable")]
    codes = host.name[rows]
    for code in set(codes.tolist()):
        name = _block_name(trace.strings[code])
        number = names.words.index(name) if name in names.words else -1
        own = np.flatnonzero(names.code[gathers] == number)
        times = host.start_ns[rows[codes == code]]
        place = np.searchsorted(times, used[own])
        copied = place < len(times)
        used[own[copied]] = times[place[copied]]
    return compute_before(evidence, used) - evidence.start_ns[gathers]


def _memory(
    evidence: StrategyEvidence, gathers: Bools, names: _BlockNames, shards: int | None
) -> ShardMemory | None:
    """Counts parameters from the gathers, each block once."""
    width = _element_bytes(evidence, gathers)
    sizes = evidence.size_bytes[gathers]
    if not len(sizes) or not shards or not width or (sizes < 0).any():
        return None
    largest = np.zeros(len(names.words), np.int64)
    np.maximum.at(largest, names.code[gathers], sizes)
    parameters = int(largest.sum()) // width
    per_parameter = tuple(bytes_per_parameter(stage, shards) for stage in STAGES)
    rest = bytes_at_rest(evidence.captured)
    return ShardMemory(
        parameters=parameters,
        shards=shards,
        bytes_per_parameter=per_parameter,
        formula_bytes=tuple(round(value * parameters) for value in per_parameter),
        measured_parameter_bytes=rest.get("parameters"),
        measured_gradient_bytes=rest.get("gradients"),
        measured_optimizer_bytes=rest.get("optimizer"),
    )


def bytes_at_rest(captured: CapturedMemory | None) -> dict[str, int]:
    """What a rank holds between steps, by category; empty when memory was not captured."""
    if captured is None:
        return {}
    held = {phase.phase: phase.categories for phase in captured.phases}
    categories = next((held[name] for name in _AT_REST if name in held), {})
    return {name: value for name, value in categories.items() if value is not None}


def _element_bytes(evidence: StrategyEvidence, gathers: Bools) -> int | None:
    """Bytes of one gathered element, as the kernels or the calls recorded its type."""
    trace, host = evidence.trace, evidence.trace.host
    groups = {group.name for group in evidence.groups_of(gathers)}
    names = {
        args.dtype.lower()
        for args in trace.collectives
        if kind_of(args.name) == "all_gather" and args.group in groups
    }
    typed = nearest_of(host, host.dtypes >= 0, evidence.row[gathers])
    for code in distinct(host.dtypes[typed[typed >= 0]]).tolist():
        names |= set(re.findall(r'"([^"]+)"', trace.strings[code].lower())[:1])
    widths = {LOWER_CASE_BYTES[name] for name in names if name in LOWER_CASE_BYTES}
    return widths.pop() if len(widths) == 1 else None
