"""What identifies a run's work: to find its promises again, and to list how A and B differ."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.records.comparison import Difference
from stepscope.records.promise import Workload
from stepscope.records.trace import HostKind
from stepscope.verify.traits import PRODUCTS, device_name, is_truncated, script_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepscope.records.explanation import Explanation, Operator
    from stepscope.records.trace import Trace

SHAPES = "shapes"
# Facts of rank.json that are listed if they differ.
_FACTS = ("command", "world_size", "host", "device", "torch", "cuda", "hip", "python")


def describe_workload(facts: dict[str, Any], explanation: Explanation | None = None) -> Workload:
    """From the captured facts and the trace's operators."""
    rank = explanation.ranks[0] if explanation else None
    return Workload(
        script=script_name(facts),
        world_size=facts.get("world_size") or (rank.world_size if rank else None),
        device=device_name(facts) or (rank.device if rank else None),
        signature=None
        if rank is None or is_truncated(rank)
        else signature((row.name, row.shapes) for row in rank.operators),
    )


def describe_trace(trace: Trace, facts: dict[str, Any] | None = None) -> Workload:
    """The same, from the trace's columns instead of an explanation."""
    facts = facts or {}
    host = trace.host
    rows = np.flatnonzero(host.kind == HostKind.OPERATOR)
    pairs = np.unique(np.stack((host.name[rows], host.shapes[rows]), axis=1), axis=0).tolist()
    return Workload(
        script=script_name(facts),
        world_size=facts.get("world_size") or trace.world_size,
        device=device_name(facts) or trace.device_name,
        signature=signature(
            (trace.strings[name], trace.strings[shapes] if shapes >= 0 else "")
            for name, shapes in pairs
        ),
    )


def signature(operators: Iterable[tuple[str, str]]) -> str | None:
    """A hash of the products, convolutions and the like with their shapes; None without any."""
    products = sorted({f"{name} {shapes}" for name, shapes in operators if name in PRODUCTS})
    if not products:
        return None
    return hashlib.sha256("\n".join(products).encode()).hexdigest()[:16]


def differences(
    a: dict[str, Any], b: dict[str, Any], explained: tuple[Explanation, Explanation] | None
) -> tuple[Difference, ...]:
    """Facts that both sides have and that differ."""
    facts_a, facts_b = _words(a), _words(b)
    out = [
        Difference(name=name, a=facts_a.get(name), b=facts_b.get(name))
        for name in (dict.fromkeys((*facts_a, *facts_b)) if facts_a and facts_b else ())
        if facts_a.get(name) != facts_b.get(name)
    ]
    if explained:
        known = {row.name for row in out}
        out += [row for row in _trace_differences(*explained) if row.name not in known]
    return tuple(out)


def _words(facts: dict[str, Any]) -> dict[str, str]:
    out = {}
    for name in _FACTS:
        value = device_name(facts) if name == "device" else facts.get(name)
        if name == "command":
            value = " ".join(map(str, value or facts.get("argv") or ()))
        if value:
            out[name] = str(value)
    return out


def _trace_differences(a: Explanation, b: Explanation) -> list[Difference]:
    ranks = a.ranks[0], b.ranks[0]
    pairs: dict[str, tuple[Any, Any]] = {
        "device": (ranks[0].device, ranks[1].device),
        "world_size": (ranks[0].world_size, ranks[1].world_size),
    }
    heavy = _counterparts(ranks[0].operators, ranks[1].operators)
    if heavy:
        before, after = heavy
        pairs[SHAPES] = f"{before.name} {before.shapes}", f"{after.name} {after.shapes}"
        pairs["dtypes"] = before.dtypes, after.dtypes
    return [
        Difference(name=name, a=str(before), b=str(after))
        for name, (before, after) in pairs.items()
        if before and after and before != after
    ]


def _counterparts(a: Iterable[Operator], b: Iterable[Operator]) -> tuple[Operator, Operator] | None:
    """On each side, the heaviest product or convolution with shapes that the other lacks.

    If both sides have the same shapes, the heaviest of all.
    """
    tables = [
        {(row.name, row.shapes): row for row in reversed([*side]) if row.name in PRODUCTS}
        for side in (a, b)
    ]
    own = [[tables[i][key] for key in tables[i].keys() - tables[1 - i].keys()] for i in (0, 1)]
    if all(own):
        return max(own[0], key=_weight), max(own[1], key=_weight)
    common = tables[0].keys() & tables[1].keys()
    if any(own) or not common:
        return None
    key = max(common, key=lambda key: _weight(tables[0][key]))
    return tables[0][key], tables[1][key]


def _weight(operator: Operator) -> tuple[int, int, str]:
    return operator.device_self_ns, operator.host_self_ns, operator.shapes
