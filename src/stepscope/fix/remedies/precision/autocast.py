"""Autocast from the first module that is called until backward begins, as bf16 and fp16 use it.

Everything between the two runs under it, the loss too, as if the script's own statements stood in a
`with torch.autocast(...)` block. A torch.autograd.grad that lets the graph go is a backward too, if
it is not inside the module's forward.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.fix.proposal import Proposal, Script
from stepscope.fix.python_source import PythonSource
from stepscope.records.script_facts import Frame, ScriptFacts, TrainingPass

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess


def why_not_autocast(facts: ScriptFacts) -> str | None:
    if facts.autocast:
        return f"the script uses autocast itself ({facts.autocast})"
    if facts.dtypes and "float32" not in facts.dtypes:
        return "no parameter is fp32"
    if facts.roots and not facts.passes:
        return (
            "stepscope saw no backward pass after a call of the model, so it does not know where "
            "the loss ends"
        )
    return None


def enter_until_backward(
    training: TrainingProcess, dtype: str, is_on: Callable[[], bool] = lambda: True
) -> None:
    """Calls without gradients are left alone, and so is a model in evaluation mode once another
    call was in training mode: no backward pass follows such a call."""
    import torch

    tell = training.telling()
    running: list[Any] = []
    modes: set[bool] = set()

    def begin(module: Any, _args: Sequence[Any], _kwargs: dict[str, Any]) -> None:
        modes.add(module.training)
        if running or not is_on() or (not module.training and True in modes):
            return
        device = next(module.parameters()).device.type
        context = torch.autocast(device, dtype=getattr(torch, dtype))
        context.__enter__()
        running.append(context)
        tell(f"forward and loss run under {dtype} autocast")

    def end(_anything: Any) -> None:
        if running:
            running.pop().__exit__(None, None, None)

    def end_or_forget(anything: Any) -> None:
        """Weights may change now, and autocast remembers them: it must not, inside a root's
        forward that goes on."""
        if training.is_in_root:
            torch.clear_autocast_cache()
        else:
            end(anything)

    training.around_root(begin)
    training.before_backward(end)
    training.before_graph_is_freed(end_or_forget)
    training.before_step(end)


_LIGHTNING = {"bf16": "bf16-mixed", "fp16": "16-mixed"}


def ask_trainer(facts: ScriptFacts, option: str) -> Proposal | None:
    """What to tell a trainer of transformers or Lightning, if one runs the model: no statement of
    the script does."""
    if any(built.library == "transformers" for built in facts.built):
        words = f"give TrainingArguments {option}=True: the Trainer runs the model"
        return Proposal(by_hand=(words,))
    forwards = [frame for one in facts.passes for frames in one.forwards for frame in frames]
    if any(frame.function.endswith(".training_step") for frame in forwards):
        words = f'give Trainer precision="{_LIGHTNING[option]}": Lightning runs the model'
        return Proposal(by_hand=(words,))
    return None


class ForwardStatements(NamedTuple):
    """The statements of one block that make a loss, and the one after them that starts backward."""

    source: PythonSource
    first: ast.stmt
    last: ast.stmt
    backward: ast.stmt


def wrap_forward(script: Script, dtype: str) -> Proposal:
    """The statements from the forward to the one before backward, under autocast."""
    header = f'with torch.autocast("{script.facts.device}", dtype=torch.{dtype}):'
    proposal = Proposal()
    for one in script.facts.passes:
        found = statements_of_forward(script, one)
        if found is None or _has_autocast(found):
            where = f" (backward starts at {one.backward[0].words})" if one.backward else ""
            proposal += Proposal(
                by_hand=(f"put the forward pass and the loss under `{header}`{where}",)
            )
        else:
            source = found.source
            edits = (*source.ensure_import("torch"), *source.wrap(found.first, found.last, header))
            proposal += Proposal(edits=edits)
    return proposal


def statements_of_forward(script: Script, one: TrainingPass) -> ForwardStatements | None:
    """In the innermost block that both the forward and backward are called from."""
    for frame, source, statement in script.statements(one.backward):
        for end in (statement, *_statements_around(source, statement)):
            block = source.block_of(end)
            before = block[: block.index(end)]
            for frames in one.forwards:
                first = _leading_to(before, frames, frame)
                if first and source.has_lines_of_its_own(first, before[-1]):
                    return ForwardStatements(source, first, before[-1], end)
    return None


def _statements_around(source: PythonSource, statement: ast.stmt) -> Iterator[ast.stmt]:
    """Of the same function, innermost first."""
    for node in source.parents_of(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return
        if isinstance(node, ast.stmt):
            yield node


def _leading_to(
    block: Sequence[ast.stmt], frames: Sequence[Frame], other: Frame
) -> ast.stmt | None:
    """The statement that leads to the forward, in the same function as `other`."""
    lines = [f.line for f in frames if (f.file, f.function) == (other.file, other.function)]
    for statement in block:
        if lines and statement.lineno <= lines[0] <= (statement.end_lineno or statement.lineno):
            return statement
    return None


def _has_autocast(found: ForwardStatements) -> bool:
    """A block of the script's own, switched off perhaps, would have its way inside ours."""
    source = found.source
    around = [node for node in source.parents_of(found.backward) if isinstance(node, ast.With)]
    headers = [item.context_expr for node in around for item in node.items]
    block = source.block_of(found.backward)
    inside = block[block.index(found.first) : block.index(found.backward)]
    return any(
        isinstance(node, ast.Call) and source.called(node) == "autocast"
        for part in (*headers, *inside)
        for node in ast.walk(part)
    )
