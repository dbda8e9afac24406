"""Where a script's loop accumulates gradients, and which of its passes is the last of a step.

    for i, (x, y) in enumerate(loader):         for x, y in loader:
        loss = criterion(model(x), y) / 4           for part in range(4):
        loss.backward()                                 loss = criterion(...) / 4
        if (i + 1) % 4 == 0:                            loss.backward()
            optimizer.step()                        optimizer.step()

On the left the test of the `if` says so, on the right the loop's own counter. A place is only found
where what says so has the same value before the pass as after it.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.fix.proposal import Script
    from stepscope.fix.python_source import PythonSource
    from stepscope.records.script_facts import Frame, ScriptFacts

_PURE = (
    ast.Compare,
    ast.BoolOp,
    ast.BinOp,
    ast.UnaryOp,
    ast.Name,
    ast.Constant,
    ast.Attribute,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.expr_context,
)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationLoop:
    """The statements of a pass, and an expression that is true in the last pass of a step."""

    source: PythonSource
    first: ast.stmt
    last: ast.stmt
    is_last: str
    ddp: str


def find_loop(script: Script) -> AccumulationLoop | None:
    """None where it cannot be found for sure."""
    facts = script.facts
    if len(facts.passes) > 1:  # in several places: which comes last is not known
        return None
    for frame in facts.backward[:1]:
        source = script.source(frame.file)
        forward, step = (_in_function(frames, frame) for frames in (facts.forward, facts.step))
        if source is None or forward is None or step is None:
            continue
        loop = _Pass.find(source, forward, frame, step)
        test = loop.last_pass_test() if loop is not None else None
        ddp = _name_of_ddp(facts, frame)
        if loop is None or test is None or ddp is None:
            continue
        if source.has_lines_of_its_own(loop.first, loop.last):
            return AccumulationLoop(
                source=source, first=loop.first, last=loop.last, is_last=test, ddp=ddp
            )
    return None


def _in_function(frames: Iterable[Frame], other: Frame) -> Frame | None:
    for frame in frames:
        if (frame.file, frame.function) == (other.file, other.function):
            return frame
    return None


@dataclass(slots=True)
class _Pass:
    """Forward to backward, as statements of one block."""

    source: PythonSource
    around_backward: list[ast.stmt]  # the statement itself and those around it, innermost first
    around_step: list[ast.stmt]
    scope: ast.AST  # the function, or the file
    first: ast.stmt
    last: ast.stmt

    @classmethod
    def find(
        cls, source: PythonSource, forward: Frame, backward: Frame, step: Frame
    ) -> _Pass | None:
        chains = [_chain(source, frame.line) for frame in (forward, backward, step)]
        if any(chain is None for chain in chains):
            return None
        (in_forward, _), (in_backward, scope), (in_step, _) = (c for c in chains if c is not None)
        for last in in_backward:
            block = source.block_of(last)
            first = next((s for s in block if s in in_forward), None)
            if first is not None and block.index(first) <= block.index(last):
                return cls(source, in_backward, in_step, scope, first, last)
        return None

    def last_pass_test(self) -> str | None:
        return self._test_of_guard() or self._test_of_counter()

    def _test_of_guard(self) -> str | None:
        """The `if` around the optimizer's step, after the pass in the same iteration."""
        place = self.around_backward.index(self.last)
        for last in self.around_backward[place:]:
            if isinstance(last, ast.For | ast.While) and last is not self.last:
                return None
            block = self.source.block_of(last)
            guard = next((s for s in block if s in self.around_step), None)
            if guard is None or guard is last or block.index(guard) < block.index(last):
                continue
            first = next(s for s in block if s is last or _holds(s, self.first))
            between = block[block.index(last) + 1 : block.index(guard)]
            span = block[block.index(first) : block.index(last) + 1]
            if not isinstance(guard, ast.If) or not _in_body(guard, self.around_step):
                return None
            if self._steps_outside(guard) or _use_gradients(between):
                return None
            if not self._always_runs(last):
                return None
            test = self._test_before(guard.test, span, between)
            if test is not None:
                self.first, self.last = first, last
            return test
        return None

    def _test_before(
        self, test: ast.expr, span: Sequence[ast.stmt], between: Sequence[ast.stmt]
    ) -> str | None:
        """The same test before the pass; counters that go up in between are ahead of it."""
        added, others = _counters(between)
        if not self._keeps_its_value(test, [*span, *others]):
            return None
        text = self.source.segment(test)
        if added and added.keys() & _names(test):
            return ast.unparse(_Ahead(added).visit(copy.deepcopy(test)))
        return text if "\n" not in text else ast.unparse(test)

    def _test_of_counter(self) -> str | None:
        """The step follows a `for counter in range(passes)` that holds the pass."""
        loops = [s for s in self.around_backward if isinstance(s, ast.For | ast.While)]
        if not loops or not isinstance(loops[0], ast.For) or loops[0].orelse:
            return None
        loop = loops[0]
        block = self.source.block_of(loop)
        after = next((s for s in block if s in self.around_step), None)
        if after is None or block.index(after) <= block.index(loop):
            return None
        passes = _range_of(loop)
        jumps = [n for s in loop.body for n in _walk(s) if isinstance(n, ast.Break | ast.Continue)]
        if passes is None or jumps or self._steps_outside(after) or _use_gradients(loop.body):
            return None
        if not self._always_runs(loop.body[-1]):
            return None
        counter = loop.target
        assert isinstance(counter, ast.Name)
        both = ast.Compare(left=counter, ops=[ast.Eq()], comparators=[passes])
        if not self._keeps_its_value(both, loop.body):
            return None
        return f"{counter.id} + 1 == {self.source.segment(passes)}"

    def _steps_outside(self, guard: ast.stmt) -> bool:
        """Whether the same optimizer steps elsewhere too, as after an epoch's last passes."""
        steps = [n for n in _walk(self.scope) if _is_step(n)]
        inside = {id(n) for n in ast.walk(guard)}
        mine = {self._receiver(n) for n in steps if id(n) in inside}
        return any(id(n) not in inside and self._receiver(n) in mine for n in steps)

    def _receiver(self, call: ast.AST) -> str:
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Attribute)
        return self.source.segment(call.func.value)

    def _always_runs(self, until: ast.stmt) -> bool:
        """Whether the pass that starts runs backward too: no `if` or `try` may leave it out."""
        block = self.source.block_of(until)
        for node in self.around_backward:
            if isinstance(node, ast.If):
                if not all(_starts_backward(branch) for branch in (node.body, node.orelse)):
                    return False
            elif isinstance(node, ast.For | ast.While | ast.Try | ast.Match):
                return False
            if node in block:
                break
        return True

    def _keeps_its_value(self, test: ast.expr, statements: Sequence[ast.stmt]) -> bool:
        """Whether these statements, and what they call, leave the expression's value alone."""
        if not all(_is_pure(node) for node in ast.walk(test)):
            return False
        stored = {name for s in statements for name in _stored_names(s)}
        shared = {
            name
            for node in ast.walk(self.source.tree)
            if isinstance(node, ast.Global | ast.Nonlocal)
            for name in node.names
        }
        if _names(test) & (stored | shared):
            return False
        attributes = {n.attr for n in ast.walk(test) if isinstance(n, ast.Attribute)}
        return not attributes & self._stored_attributes(statements)

    def _stored_attributes(self, statements: Sequence[ast.stmt]) -> set[str]:
        """Attributes that change in these statements, or in a function that they might call."""
        mine = {id(n) for n in _walk(self.scope)}
        inside = {id(n) for s in statements for n in ast.walk(s)}
        building = {
            id(n)
            for function in ast.walk(self.source.tree)
            if isinstance(function, ast.FunctionDef) and function.name == "__init__"
            for n in ast.walk(function)
        }
        return {
            node.attr
            for node in ast.walk(self.source.tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store | ast.Del)
            and (id(node) in inside or id(node) not in mine | building)
        }


class _Ahead(ast.NodeTransformer):
    """Names as they will be once they have gone up."""

    def __init__(self, added: dict[str, ast.expr]) -> None:
        self._added = added

    def visit_Name(self, node: ast.Name) -> ast.expr:
        more = self._added.get(node.id)
        return node if more is None else ast.BinOp(left=node, op=ast.Add(), right=more)


def _chain(source: PythonSource, line: int) -> tuple[list[ast.stmt], ast.AST] | None:
    """The statement on this line and those around it up to its function, which comes second."""
    statement = source.statement_at(line)
    if statement is None:
        return None
    chain = [statement]
    for node in source.parents_of(statement):
        if isinstance(node, (*_SCOPES, ast.Module)):
            return chain, node
        if isinstance(node, ast.stmt):
            chain.append(node)
    return chain, source.tree


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all inside it, but not what functions inside it do."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _SCOPES):
            yield from _walk(child)


def _is_pure(node: ast.AST) -> bool:
    """Computes without changing anything, as far as its own part goes."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "len" and not node.keywords
    return isinstance(node, _PURE)


def _holds(statement: ast.stmt, other: ast.stmt) -> bool:
    return any(node is other for node in ast.walk(statement))


def _in_body(guard: ast.If, chain: Sequence[ast.stmt]) -> bool:
    return any(statement in chain for statement in guard.body)


def _is_step(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "step"
    )


def _starts_backward(statements: Sequence[ast.stmt]) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr == "backward"
        for statement in statements
        for node in ast.walk(statement)
    )


def _use_gradients(statements: Sequence[ast.stmt]) -> bool:
    """Whether gradients are clipped, unscaled or read."""
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute | ast.Name)
    }
    return any(name.startswith(("clip_grad", "unscale_")) or name == "grad" for name in names)


def _counters(statements: Sequence[ast.stmt]) -> tuple[dict[str, ast.expr], list[ast.stmt]]:
    """What `name += number` adds, by name, and all other statements."""
    added: dict[str, ast.expr] = {}
    others: list[ast.stmt] = []
    for statement in statements:
        if (
            isinstance(statement, ast.AugAssign)
            and isinstance(statement.op, ast.Add)
            and isinstance(statement.target, ast.Name)
            and isinstance(statement.value, ast.Constant)
            and statement.target.id not in added
        ):
            added[statement.target.id] = statement.value
        else:
            others.append(statement)
    return added, others


def _range_of(loop: ast.For) -> ast.expr | None:
    """`passes` of `for counter in range(passes)`."""
    call = loop.iter
    if (
        isinstance(loop.target, ast.Name)
        and isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "range"
        and len(call.args) == 1
        and not call.keywords
    ):
        return call.args[0]
    return None


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _stored_names(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


def _name_of_ddp(facts: ScriptFacts, other: Frame) -> str | None:
    """What the function with the loop calls the model that it trains; a compiled one hands
    no_sync() on to DDP."""
    for call in facts.root_calls:
        for frame, name in zip(call.frames, call.names, strict=True):
            same = (frame.file, frame.function) == (other.file, other.function)
            if same and name and call.type in ("DistributedDataParallel", "OptimizedModule"):
                return name
    return None
