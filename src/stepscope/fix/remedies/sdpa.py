"""Hand-written attention as one call of torch's; only proposed, never injected."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.hand_written_attention import find_attention
from stepscope.fix.proposal import Proposal
from stepscope.fix.python_source import Edit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.fix.hand_written_attention import WrittenAttention
    from stepscope.fix.proposal import Script
    from stepscope.fix.python_source import PythonSource
    from stepscope.records.script_facts import ScriptFacts


def fits(facts: ScriptFacts, value: str) -> str | None:
    if not facts.sources:
        return "no module is defined in the user's own files"
    return None


def patch(script: Script, value: str) -> Proposal:
    proposal = Proposal()
    for file in script.facts.sources:
        source = script.source(file)
        for attention in find_attention(source.tree) if source is not None else ():
            assert source is not None
            proposal += _replaced(source, attention)
    return proposal


def _replaced(source: PythonSource, attention: WrittenAttention) -> Proposal:
    steps = attention.scores.steps
    call = _call(source, attention)
    if not attention.is_alone or not all(_stands_alone(source, step) for step in steps):
        where = f"{source.file}:{attention.product.lineno}"
        return Proposal(by_hand=(f"{where}: this attention can be one call: {call}",))
    edits = (
        *(() if _functional(source) else source.ensure_import("torch.nn.functional")),
        *(_removed(source, step) for step in steps),
        source.replace(attention.product, call),
    )
    return Proposal(edits=edits)


def _call(source: PythonSource, attention: WrittenAttention) -> str:
    scores = attention.scores
    parts = [source.segment(node) for node in (scores.query, scores.key, attention.value)]
    parts += [f"attn_mask={scores.mask}"] if scores.mask else []
    parts += [f"dropout_p={scores.dropout}"] if scores.dropout else []
    parts += [f"scale={scores.scale or '1.0'}"]
    module = _functional(source) or "torch.nn.functional"
    return f"{module}.scaled_dot_product_attention({', '.join(parts)})"


def _functional(source: PythonSource) -> str:
    """What the file calls torch.nn.functional."""
    return next(_functional_names(source), "")


def _functional_names(source: PythonSource) -> Iterator[str]:
    for node in source.tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if f"{prefix}{alias.name}" == "torch.nn.functional" and (prefix or alias.asname):
                    yield alias.asname or alias.name


def _stands_alone(source: PythonSource, statement: ast.stmt) -> bool:
    """Nothing else is on its lines."""
    block = source.block_of(statement)
    lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    others = [other for other in block if other is not statement]
    shared = any(other.lineno in lines or other.end_lineno in lines for other in others)
    return source.starts_line(statement) and not shared


def _removed(source: PythonSource, statement: ast.stmt) -> Edit:
    after = source.insert_after(statement, "x").start
    before = source.insert_before(statement, "x").start
    return Edit(source.file, before, after, b"")


FIX = Fix(id="sdpa", effect=Effect.ROUNDING, fits=fits, patch=patch)
