"""Autocast from the first module that is called until backward begins, as bf16 and fp16 use it.

Everything between the two runs under it, the loss too, as if the script's own statements stood in a
`with torch.autocast(...)` block.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from stepscope.fix.proposal import Proposal
from stepscope.fix.source_lines import NoPlaceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.fix.proposal import Script
    from stepscope.fix.python_source import PythonSource
    from stepscope.fix.training_process import TrainingProcess
    from stepscope.records.script_facts import Frame, ScriptFacts


def why_not_autocast(facts: ScriptFacts) -> str | None:
    if facts.autocast:
        return f"the script has autocast of its own ({facts.autocast})"
    if facts.dtypes and "float32" not in facts.dtypes:
        return "no parameter is fp32"
    return None


def enter_until_backward(training: TrainingProcess, dtype: str) -> None:
    import torch

    tell = training.telling()
    running: list[Any] = []

    def begin(module: Any, _args: Sequence[Any], _kwargs: dict[str, Any]) -> None:
        if running:
            return
        device = next(module.parameters()).device.type
        context = torch.autocast(device, dtype=getattr(torch, dtype))
        context.__enter__()
        running.append(context)
        tell(f"forward and loss run under {dtype} autocast")

    def end(_outputs: Any) -> None:
        if running:
            running.pop().__exit__(None, None, None)

    training.around_root(begin)
    training.before_backward(end)


def wrap_forward(script: Script, dtype: str) -> Proposal:
    """The statements from the forward to the one before backward, under autocast."""
    header = f'with torch.autocast("{script.facts.device}", dtype=torch.{dtype}):'
    by_hand = f"put the forward pass and the loss under `{header}`"
    found = statements_of_forward(script)
    if found is None:
        return Proposal(by_hand=(by_hand,))
    source, first, last = found
    try:
        edits = (*source.ensure_import("torch"), *source.wrap(first, last, header))
    except NoPlaceError:
        return Proposal(by_hand=(f"{by_hand} ({source.file}:{first.lineno})",))
    return Proposal(edits=edits)


def statements_of_forward(script: Script) -> tuple[PythonSource, ast.stmt, ast.stmt] | None:
    """The first and last statement, of one block, that make the loss before backward begins."""
    facts = script.facts
    for frame in facts.backward:
        source = script.source(frame.file)
        if source is None:
            continue
        end = source.statement_at(frame.line)
        begin = _statement_in(source, facts.forward, frame)
        found = _before(source, begin, end) if begin is not None and end is not None else None
        if found is not None:
            return source, *found
    return None


def _before(
    source: PythonSource, begin: ast.stmt, end: ast.stmt
) -> tuple[ast.stmt, ast.stmt] | None:
    """The statements of one block from the one that holds `begin` up to where `end` is reached."""
    around_end = [end, *source.parents_of(end)]
    around_begin = [begin, *source.parents_of(begin)]
    for node in around_end:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            return None
        if not isinstance(node, ast.stmt):
            continue
        block = source.block_of(node)
        holder = next((one for one in block if one in around_begin), None)
        if holder is not None:
            first, last = block.index(holder), block.index(node) - 1
            return (holder, block[last]) if first <= last else None
    return None


def _statement_in(source: PythonSource, frames: Sequence[Frame], other: Frame) -> ast.stmt | None:
    """The statement of the same function that leads to the forward."""
    for frame in frames:
        if (frame.file, frame.function) == (other.file, other.function):
            return source.statement_at(frame.line)
    return None
