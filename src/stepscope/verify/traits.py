"""Traits of one side's training step, from its captured facts and its trace.

A trait is a name and a value as text. A trait that was not captured is left out, never guessed.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.explain.truncate_tables import OTHERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.records.applied_remedy import RunRemedy
    from stepscope.records.explanation import Explanation, Operator, RankExplanation

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
    """From the first rank: every rank runs the same program."""
    words = _words_of_facts(facts)
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
    return Traits(
        words=words,
        facts=facts,
        gradients=_gradients(rank.operators, steps),
        products=_products(rank.operators, steps),
        blocking=None if rank.kind == "cpu" else sum(x.count for x in rank.syncs) / steps,
    )


def is_truncated(rank: RankExplanation) -> bool:
    """With very many ranks only the longest rows are kept: a missing row says nothing."""
    return OTHERS in {*(x.name for x in rank.operators), *(x.name for x in rank.kernels)}


def script_name(facts: dict[str, Any]) -> str | None:
    """The training script: from the process's own argv, not the launcher's."""
    argv = facts.get("argv") or ()
    return Path(str(argv[0])).name or None if argv else None


def device_name(facts: dict[str, Any]) -> str | None:
    device = facts.get("device")
    name = device.get("name") if isinstance(device, dict) else device
    return str(name) if name else None


def _words_of_facts(facts: dict[str, Any]) -> dict[str, str]:
    ddp = (facts.get("communication") or {}).get("ddp") or ()
    cap = ddp[0].get("bucket_cap_bytes") if ddp else None
    known: dict[str, Any] = {name: facts.get(name) for name in _FACTS}
    known |= {"script": script_name(facts), "device": device_name(facts)}
    known |= {"world size": facts.get("world_size"), "bucket size": f"{cap} bytes" if cap else None}
    known |= {REMEDIES: _remedy_words(facts)}
    return {name: str(value) for name, value in known.items() if value}


def _remedy_words(facts: dict[str, Any]) -> str | None:
    """What was applied to the whole run; None for steps that no run folder describes."""
    remedies: Sequence[RunRemedy] | None = facts.get("remedies")
    if remedies is None:
        return None
    applied = sorted(remedy.id for remedy in remedies if remedy.outcome == "applied")
    return ", ".join(applied) or NO_REMEDIES


def _words_of_trace(rank: RankExplanation, names: frozenset[str]) -> dict[str, str]:
    products = [row for row in rank.operators if row.name in PRODUCTS]
    words = {"compile": _yes(any(name.startswith(_COMPILED) for name in names))}
    words["CUDA graphs"] = _yes(_is_graphed(rank))
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


def _is_graphed(rank: RankExplanation) -> bool:
    """Kernels are marked as nodes of a graph, or far outnumber the calls that launch them."""
    launches = rank.launches
    many = launches.linked > _KERNELS_PER_LAUNCH * launches.calls
    return bool(launches.graph_kernels) or (launches.calls > 0 and many)


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


def _gradients(operators: Sequence[Operator], steps: int) -> dict[str, float]:
    counts: dict[str, float] = defaultdict(float)
    for row in operators:
        if row.name == _GRADIENT and row.shapes:
            counts[row.shapes] += row.calls / steps
    return dict(counts)


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
                return _smallest(before, after, factor)
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


def _smallest(before: set[Shapes], after: set[Shapes], factor: float) -> tuple[int, int]:
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


def common_factor(a: dict[str, float], b: dict[str, float]) -> float | None:
    """How many times as often B does everything that A does; None without one common factor."""
    if not a or a.keys() != b.keys():
        return None
    factors = [b[name] / a[name] for name in a]
    middle = sorted(factors)[len(factors) // 2]
    return middle if all(math.isclose(factor, middle, rel_tol=0.1) for factor in factors) else None
