"""Tensor parallelism: layers split over ranks that communicate inside forward and backward.

Functional collectives alone do not prove it: gradient clipping sums norms over FSDP's group, and
scripts sum a loss. The proof is a group with a telling name, parameters that are split over a group
which FSDP does not use or, in a bare trace, more than scalars in such a group.
"""

from __future__ import annotations

import re
from itertools import zip_longest

import numpy as np

from stepscope.explain.host_calls import PREFIX
from stepscope.explain.strategies.evidence import Bools, Int32, StrategyEvidence, names_at
from stepscope.explain.strategies.fully_sharded import FUNCTIONAL, fsdp_groups
from stepscope.records.strategies import Layer, RankTensorParallel
from stepscope.records.trace import ABSENT, HostKind
from stepscope.step.work import rows_named
from stepscope.text.words import counted
from stepscope.trace.links import nearest_of

_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_GROUP = re.compile(r"(?:^|[_\W])(?:tp|tensor|sp)(?:$|[_\W])|tensor_?(?:model_?)?parallel", re.I)
_SPLIT = re.compile(r"S\(|Shard")
_SCALAR_BYTES = 8


def find(evidence: StrategyEvidence, free: Bools) -> tuple[RankTensorParallel | None, Bools]:
    """Functional collectives, groups by name, or a group used alike in forward and backward."""
    wanted = free & evidence.of_kind(*_KINDS)
    groups = _split_groups(evidence)
    functional = _functional(evidence, wanted, groups)
    described = [bool(_GROUP.search(group.description)) for group in evidence.groups]
    named = np.array([*described, False])[evidence.group]
    mine = wanted & (functional | named)
    words = []
    if (wanted & named).any():
        words.append("the group's name says so")
    if functional.any():
        words.append("functional collectives inside forward and backward")
    if not mine.any():
        # As in Megatron: forward and backward reduce the same sizes equally often in one
        # group.
        reduces = wanted & evidence.of_kind("all_reduce")
        out = np.zeros(len(evidence), np.bool_)
        for group in set(evidence.group[reduces].tolist()):
            own = reduces & (evidence.group == group) & _not_scalar(evidence)
            ahead = evidence.size_bytes[own & ~evidence.backward]
            back = evidence.size_bytes[own & evidence.backward]
            if len(ahead) >= 2 * len(evidence.pace) and set(ahead.tolist()) <= set(back.tolist()):
                out |= own & np.isin(evidence.size_bytes, ahead)
        mine = wanted & out
        words = ["all-reduces of the same sizes in forward and in backward"]
    if not mine.any():
        return None, mine
    steps = evidence.steps
    sizes = evidence.size_bytes[mine]
    split = _split_parameters(evidence, groups or set())
    if split:
        words.append(f"split over ranks: {counted(split, 'parameter')}")
    return RankTensorParallel(
        groups=evidence.groups_of(mine),
        evidence=tuple(words),
        step_ns=evidence.step_ns,
        forward_count=int((mine & ~evidence.backward).sum()) / steps,
        backward_count=int((mine & evidence.backward).sum()) / steps,
        size_bytes=round(int(sizes.sum()) / steps) if (sizes >= 0).all() else None,
        comm_ns=evidence.comm_ns(mine),
        exposed_ns=evidence.exposed_comm_ns(mine),
        split_parameters=split,
        layers=_layers(evidence, mine),
    ), mine


def _functional(evidence: StrategyEvidence, wanted: Bools, groups: set[str] | None) -> Bools:
    """Functional collectives in groups that split layers, by the capture or by their sizes."""
    calls = wanted & (evidence.inside(FUNCTIONAL) >= 0)
    if groups is not None:
        return calls & evidence.of_groups(groups)
    calls &= ~evidence.of_groups(fsdp_groups(evidence))
    telling = evidence.group[calls & _not_scalar(evidence)]
    return calls & np.isin(evidence.group, telling)


def _split_groups(evidence: StrategyEvidence) -> set[str] | None:
    """Groups other than FSDP's that parameters are split over; None if not captured."""
    placements = evidence.layout.get("placements")
    if placements is None or any("groups" not in placement for placement in placements):
        return None
    columns = (
        (placement.get("groups") or [], placement.get("placements") or [])
        for placement in placements
    )
    pairs = (pair for column in columns for pair in zip(*column, strict=False))
    split = {str(group) for group, how in pairs if _SPLIT.search(str(how))}
    return split - fsdp_groups(evidence)


def _not_scalar(evidence: StrategyEvidence) -> Bools:
    return (evidence.size_bytes < 0) | (evidence.size_bytes > _SCALAR_BYTES)


def _split_parameters(evidence: StrategyEvidence, groups: set[str]) -> int | None:
    """Parameters split over a mesh dimension of tensor parallelism."""
    count = 0
    for placement in evidence.layout.get("placements") or []:
        names, own = placement.get("mesh") or [], placement.get("groups") or []
        dimensions = zip_longest(names, own, placement.get("placements") or [], fillvalue="")
        if any(
            (_GROUP.search(str(name)) or str(group) in groups) and _SPLIT.search(str(how))
            for name, group, how in dimensions
        ):
            count += int(placement.get("count") or 0)
    return count or None


def _layers(evidence: StrategyEvidence, mine: Bools) -> tuple[Layer, ...]:
    """By nn.Module, if recorded; backward counts with its forward operator's module."""
    calls = np.flatnonzero(mine)
    modules = _modules(evidence, evidence.row[calls])
    out = []
    for code in dict.fromkeys(modules[modules >= 0].tolist()):
        at = calls[modules == code]
        backward = int(evidence.backward[at].sum())
        out.append(
            Layer(
                name=evidence.trace.strings[code].removeprefix(PREFIX),
                forward_count=(len(at) - backward) / evidence.steps,
                backward_count=backward / evidence.steps,
                **evidence.times_per_step(at),
            )
        )
    return tuple(out)


def _modules(evidence: StrategyEvidence, rows: Int32) -> Int32:
    """The module's name around each host row, as a string code, or ABSENT."""
    trace, host = evidence.trace, evidence.trace.host
    python = host.kind == HostKind.PYTHON
    named = rows_named(trace, host, python, lambda name: name.startswith(PREFIX))
    if not named.any():
        return np.full(len(rows), ABSENT, np.int32)
    linked = nearest_of(host, host.forward_of >= 0, rows)
    forward = np.where(linked >= 0, host.forward_of[np.maximum(linked, 0)], rows)
    return names_at(host, nearest_of(host, named, forward))
