"""Describe the step of a run: its traits, and what identifies its work, to find its
predictions again. What was not captured is left out, never guessed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.explain.rank import OTHERS
from stepscope.records.comparison import Difference
from stepscope.records.explanation import Explanation, Operator, RankExplanation
from stepscope.records.prediction import Workload
from stepscope.records.run import RunRemedy
from stepscope.records.trace import HostKind, Trace

# Traits of one side's training step, from its captured facts and its trace.
#
# A trait is a name and a value as text. A trait that was not captured is left out, never guessed.

# Operators that identify the model; others vary with the version of torch.
PRODUCTS = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "embedding", "native_layer_norm")
)
# Operators that run in a narrower dtype if one is chosen; norms keep theirs.
_MULTIPLIED = PRODUCTS - {"aten::embedding", "aten::native_layer_norm"}
_KERNELS_PER_LAUNCH = 20  # with more, the calls launch graphs
_GRADIENT = "torch::autograd::AccumulateGrad"  # runs once per parameter in each backward
_DTYPES = {"float": "fp32", "double": "fp64", "c10::Half": "fp16", "c10::BFloat16": "bf16"}
_FUSED = re.compile(r"_fused_(?:adam|adamw|sgd|adagrad)")
_FOREACH = re.compile(r"_foreach_(?:add|lerp)")  # clipping and zeroing gradients use others
_ADAM = re.compile(r"addcdiv|_fused_adam")
_COMPILED = ("triton_", "## Call CompiledFxGraph", "Torch-Compiled Region", "CompiledFunction")
_FACTS = ("host", "torch", "cuda", "hip", "python")

REMEDIES, NO_REMEDIES = "remedies", "none"  # a trait: what `run --with` applied

# One operator's input shapes, such as ((64, 512), (512, 10))
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """One side's step."""

    words: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # of rank.json
    gradients: dict[str, float] = field(default_factory=dict)  # per step, by parameter shape
    products: dict[tuple[str, Shapes], float] = field(default_factory=dict)  # calls per step
    blocking: float | None = None  # calls per step that wait for the device


def read_traits(facts: dict[str, Any], explanation: Explanation | None) -> Traits:
    """Read traits from the first rank: every rank runs the same program."""
    ddp = (facts.get("communication") or {}).get("ddp") or ()
    cap = ddp[0].get("bucket_cap_bytes") if ddp else None
    known: dict[str, Any] = {name: facts.get(name) for name in _FACTS}
    known |= {"script": script_name(facts), "device": device_name(facts)}
    known |= {"world size": facts.get("world_size"), "bucket size": f"{cap} bytes" if cap else None}
    known |= {REMEDIES: _remedy_words(facts)}
    words = {name: str(value) for name, value in known.items() if value}
    if explanation is None:
        return Traits(words=words, facts=facts)
    rank = explanation.ranks[0]
    if is_truncated(rank):
        return Traits(words=words, facts=facts)
    steps = max(1, len(rank.steps.steps))
    names = frozenset((*(x.name for x in rank.operators), *(x.name for x in rank.kernels)))
    kinds = sorted({str(type(x).__struct_config__.tag) for x in explanation.strategies})
    words = _words_of_trace(rank, names) | words
    words["strategy"] = ", ".join(kinds) or "none"
    counts: dict[str, float] = defaultdict(float)
    for row in rank.operators:
        if row.name == _GRADIENT and row.shapes:
            counts[row.shapes] += row.calls / steps
    return Traits(
        words=words,
        facts=facts,
        gradients=dict(counts),
        products=_products(rank.operators, steps),
        blocking=None if rank.kind == "cpu" else sum(x.count for x in rank.syncs) / steps,
    )


def is_truncated(rank: RankExplanation) -> bool:
    """Tell whether rows are missing: with very many ranks only the longest rows are kept: a missing
    row says nothing."""
    return OTHERS in {*(x.name for x in rank.operators), *(x.name for x in rank.kernels)}


def script_name(facts: dict[str, Any]) -> str | None:
    """The training script: from the process's own argv, not the launcher's."""
    argv = facts.get("argv") or ()
    return Path(str(argv[0])).name or None if argv else None


def device_name(facts: dict[str, Any]) -> str | None:
    device = facts.get("device")
    name = device.get("name") if isinstance(device, dict) else device
    return str(name) if name else None


def _remedy_words(facts: dict[str, Any]) -> str | None:
    """Return what was applied to the whole run; None for steps that no run folder describes."""
    remedies: Sequence[RunRemedy] | None = facts.get("remedies")
    if remedies is None:
        return None
    applied = sorted(remedy.id for remedy in remedies if remedy.outcome == "applied")
    return ", ".join(applied) or NO_REMEDIES


def _words_of_trace(rank: RankExplanation, names: frozenset[str]) -> dict[str, str]:
    products = [row for row in rank.operators if row.name in PRODUCTS]
    words = {"compile": _yes(any(name.startswith(_COMPILED) for name in names))}
    # Kernels are marked as nodes of a graph, or far outnumber the calls that launch them.
    launches = rank.launches
    many = launches.linked > _KERNELS_PER_LAUNCH * launches.calls
    words["CUDA graphs"] = _yes(bool(launches.graph_kernels) or (launches.calls > 0 and many))
    if rank.device:
        words["device"] = rank.device
    if rank.world_size:
        words["world size"] = str(rank.world_size)
    dtypes = {x for row in products if row.name in _MULTIPLIED for x in _dtypes(row.dtypes)}
    if any("tf32" in row.name.lower() for row in rank.kernels):
        dtypes.add("tf32")
    held = rank.memory.categories.get("parameters") if rank.memory else None
    if held and rank.memory and rank.memory.source == "capture":
        words["parameter memory"] = f"{held} bytes"
    if dtypes:
        words["precision"] = ", ".join(sorted(dtypes))
    if products:  # else the step runs as a graph and its operators are not recorded
        words["optimizer"] = _optimizer_form(names)
        words["update rule"] = "Adam" if any(map(_ADAM.search, names)) else "another"
    return words


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _optimizer_form(names: Iterable[str]) -> str:
    """Test for fused first: it counts its steps with a foreach."""
    names = tuple(names)
    if any(map(_FUSED.search, names)):
        return "fused"
    lists = any(map(_FOREACH.search, names)) or any("multi_tensor" in name for name in names)
    return "foreach" if lists else "loop"


def _dtypes(text: str) -> set[str]:
    """Floating-point dtypes only: indices and masks say nothing."""
    names = set(re.findall(r'"([^"]+)"', text))
    return {_DTYPES[name] for name in names & _DTYPES.keys()} | (
        {"fp8"} if any("Float8" in name for name in names) else set()
    )


def _products(operators: Sequence[Operator], steps: int) -> dict[tuple[str, Shapes], float]:
    counts: dict[tuple[str, Shapes], float] = defaultdict(float)
    for row in operators:
        if row.name in PRODUCTS and (shapes := _shapes(row.shapes)):
            counts[row.name, shapes] += row.calls / steps
    return dict(counts)


def _shapes(text: str) -> Shapes | None:
    """The tensors' shapes; None if none was recorded."""
    try:
        given = json.loads(text)
    except ValueError:
        return None
    flat = tuple(
        tuple(dims)
        for dims in given
        if isinstance(dims, list) and dims and all(isinstance(size, int) for size in dims)
    )
    return flat or None


def batch_growth(a: Iterable[Shapes], b: Iterable[Shapes]) -> tuple[int, int] | None:
    """The batch of A and of B, if one factor on some dimensions turns A's shapes into B's.

    The smallest dimension that grows is the batch: flattened dimensions are multiples of it.
    """
    before, after = set(a), set(b)
    one_sided = before - after or before
    for shapes in one_sided:
        for other in after - before or after:
            factor = _factor(shapes, other)
            if factor is not None and factor != 1 and _all_grow(before, after, factor):
                grown = {
                    (x, y)
                    for a in before
                    for b in after
                    if _factor(a, b) == factor
                    for dims, others in zip(a, b, strict=True)
                    for x, y in zip(dims, others, strict=True)
                    if x != y
                }
                return min(grown)
    return None


def _factor(a: Shapes, b: Shapes) -> float | None:
    """The one ratio other than 1 among their dimensions; None if there are several or none."""
    if [len(dims) for dims in a] != [len(dims) for dims in b]:
        return None
    ratios = {
        y / x
        for dims, others in zip(a, b, strict=True)
        for x, y in zip(dims, others, strict=True)
        if x > 0 and x != y
    }
    return ratios.pop() if len(ratios) == 1 else None


def _all_grow(before: set[Shapes], after: set[Shapes], factor: float) -> bool:
    """Every shape of A stays or grows into one of B, and every one of B comes from one of A."""

    def fits(a: Shapes, b: Shapes) -> bool:
        return a == b or _factor(a, b) == factor

    return all(any(fits(a, b) for b in after) for a in before) and all(
        any(fits(a, b) for a in before) for b in after
    )


def common_factor(a: dict[str, float], b: dict[str, float]) -> float | None:
    """Return how many times as often B does all that A does; None without one common factor."""
    if not a or a.keys() != b.keys():
        return None
    factors = [b[name] / a[name] for name in a]
    middle = sorted(factors)[len(factors) // 2]
    return middle if all(math.isclose(factor, middle, rel_tol=0.1) for factor in factors) else None


# What identifies a run's work: to find its promises again, and to list how A and B differ.

SHAPES = "shapes"
# Facts of rank.json that are listed if they differ.
_LISTED_FACTS = ("command", "world_size", "host", "device", "torch", "cuda", "hip", "python")


def describe_workload(facts: dict[str, Any], explanation: Explanation | None = None) -> Workload:
    """Describe it from the captured facts and the trace's operators."""
    if explanation is None:
        return _workload(facts, None, None, ())
    rank = explanation.ranks[0]
    operators = () if is_truncated(rank) else rank.operators
    named = ((row.name, row.shapes) for row in operators)
    return _workload(facts, rank.world_size, rank.device, named)


def describe_trace(trace: Trace, facts: dict[str, Any] | None = None) -> Workload:
    """The same, from the trace's columns instead of an explanation."""
    facts = facts or {}
    host = trace.host
    rows = np.flatnonzero(host.kind == HostKind.OPERATOR)
    pairs = np.unique(np.stack((host.name[rows], host.shapes[rows]), axis=1), axis=0).tolist()
    strings = trace.strings
    named = ((strings[name], strings[shapes] if shapes >= 0 else "") for name, shapes in pairs)
    return _workload(facts, trace.world_size, trace.device_name, named)


def _workload(
    facts: dict[str, Any],
    world_size: int | None,
    device: str | None,
    operators: Iterable[tuple[str, str]],
) -> Workload:
    return Workload(
        script=script_name(facts),
        world_size=facts.get("world_size") or world_size,
        device=device_name(facts) or device,
        signature=signature(operators),
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
    for name in _LISTED_FACTS:
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
    """Find on each side the heaviest product or convolution with shapes that the other lacks.

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
