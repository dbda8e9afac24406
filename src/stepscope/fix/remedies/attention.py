"""Replace hand-written attention by one call of torch's: only proposed, never injected."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from stepscope.fix.declaration import Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.fix.python_source import Edit, PythonSource
from stepscope.records.script_facts import ScriptFacts

# Find attention that is written out: softmax(q @ k.transpose(-2, -1) * scale + mask) @ v.
#
# The statements of a function are followed from the first product to the last. What is not
# understood ends the search: nothing is guessed.

_LAST_TWO = ({-2, -1}, {2, 3})
_TRANSPOSES = ("transpose", "swapaxes", "swapdims")
_PRODUCTS = ("matmul", "bmm")
_CASTS = ("to", "type_as", "float", "half", "bfloat16")


@dataclass(frozen=True, slots=True)
class Transposed:
    """A key with its last two dimensions exchanged."""

    key: ast.expr
    steps: tuple[ast.stmt, ...] = ()
    reads: tuple[ast.Name, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Scores:
    """q @ k.T, scaled and masked so far; `weights` once softmax was taken."""

    query: ast.expr
    key: ast.expr
    scale: str = ""
    mask: str = ""
    dropout: str = ""
    weights: bool = False
    steps: tuple[ast.stmt, ...] = ()  # the statements that made it
    reads: tuple[ast.Name, ...] = field(default=(), compare=False)  # of what earlier steps made


@dataclass(frozen=True, slots=True)
class WrittenAttention:
    """One place: `product` is the expression that can be replaced, `steps` are then superfluous."""

    function: ast.FunctionDef
    product: ast.expr
    statement: ast.stmt
    value: ast.expr
    scores: Scores
    is_alone: bool  # nothing between is used elsewhere


def find_attention(tree: ast.Module) -> Iterator[WrittenAttention]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for block in _blocks(node):
                yield from _Reader(node).read_block(block)


def _blocks(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list) and (
                node is function or not isinstance(node, ast.FunctionDef)
            ):
                yield block


@dataclass(slots=True)
class _Reader:
    function: ast.FunctionDef
    known: dict[str, Transposed | Scores] = field(default_factory=dict)

    def read_block(self, block: Sequence[ast.stmt]) -> Iterator[WrittenAttention]:
        for statement in block:
            yield from self._products_with_values(statement)
            self._note(statement)

    def _note(self, statement: ast.stmt) -> None:
        """What the statement assigns, if it is part of an attention."""
        made = self._conditional(statement) if isinstance(statement, ast.If) else None
        assignment = made[0] if made is not None else statement
        name, value = _assigned(assignment)
        if not name:
            for stored in _stored(statement):
                self.known.pop(stored, None)
            return
        result = made[1] if made is not None else self._read(value)
        self.known.pop(name, None)
        if result is not None:
            self.known[name] = replace(result, steps=(*result.steps, statement))

    def _conditional(self, statement: ast.If) -> tuple[ast.stmt, Scores] | None:
        """`if mask is not None: scores = scores.masked_fill(mask, ...)`."""
        if len(statement.body) != 1 or statement.orelse:
            return None
        name, value = _assigned(statement.body[0])
        before = self.known.get(name)
        after = self._read(value) if name and isinstance(before, Scores) else None
        if not isinstance(before, Scores) or not isinstance(after, Scores) or before.mask:
            return None
        if replace(after, mask="") != before:
            return None
        mask = f"{after.mask} if {ast.unparse(statement.test)} else None"
        return statement.body[0], replace(after, mask=mask)

    def _products_with_values(self, statement: ast.stmt) -> Iterator[WrittenAttention]:
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr):
            return
        for node in ast.walk(statement):
            pair = _product(node) if isinstance(node, ast.expr) else None
            if pair is None or not isinstance(node, ast.expr):
                continue
            weights = self._read(pair[0])
            if isinstance(weights, Scores) and weights.weights:
                yield WrittenAttention(
                    self.function,
                    node,
                    statement,
                    pair[1],
                    weights,
                    self._is_alone(weights, statement),
                )

    def _is_alone(self, weights: Scores, until: ast.stmt) -> bool:
        """No step's result is read elsewhere, and nothing that the call needs is set meanwhile."""
        made = {_assigned(step)[0] for step in weights.steps if not isinstance(step, ast.If)}
        texts = (*map(ast.unparse, (weights.query, weights.key)), weights.scale, weights.mask)
        needed = {name for text in texts if text for name in _names(ast.parse(text))}
        first = min(step.lineno for step in weights.steps) if weights.steps else until.lineno
        changed = {
            node.id
            for node in ast.walk(self.function)
            if isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and first <= node.lineno < until.lineno
        }
        known = {id(name) for name in weights.reads}
        others = [
            node
            for node in ast.walk(self.function)
            if isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load)
            and node.id in made
            and id(node) not in known
        ]
        return not needed & changed and not others

    def _read(self, node: ast.expr | None) -> Transposed | Scores | None:
        if isinstance(node, ast.Name):
            found = self.known.get(node.id)
            return replace(found, reads=(*found.reads, node)) if found is not None else None
        if node is None:
            return None
        key = _transposed(node)
        if key is not None:
            return Transposed(key)
        pair = _product(node)
        if pair is not None:
            right = self._read(pair[1])
            if isinstance(right, Transposed):
                return Scores(pair[0], right.key, steps=right.steps, reads=right.reads)
            return None
        if isinstance(node, ast.BinOp):
            return self._arithmetic(node)
        return self._called(node) if isinstance(node, ast.Call) else None

    def _arithmetic(self, node: ast.BinOp) -> Scores | None:
        left, right = self._read(node.left), self._read(node.right)
        scores, other = (left, node.right) if isinstance(left, Scores) else (right, node.left)
        if not isinstance(scores, Scores) or scores.weights:
            return None
        text = ast.unparse(other)
        if isinstance(node.op, ast.Add) and not scores.mask:
            return replace(scores, mask=text)
        if scores.scale or scores.mask or not _is_scale(other):
            return None
        if isinstance(node.op, ast.Mult):
            return replace(scores, scale=text)
        if isinstance(node.op, ast.Div) and other is node.right:
            return replace(scores, scale=f"1 / {text}" if _is_simple(other) else f"1 / ({text})")
        return None

    def _called(self, call: ast.Call) -> Scores | None:
        """softmax, masked_fill, dropout and casts, as functions or methods."""
        name = _name(call)
        method = self._read(call.func.value) if isinstance(call.func, ast.Attribute) else None
        first = self._read(call.args[0]) if call.args else None
        scores = method if isinstance(method, Scores) else first
        if not isinstance(scores, Scores):
            return None
        rest = call.args if scores is method else call.args[1:]
        if name == "softmax" and _is_last_dim(call, rest) and not scores.weights:
            return replace(scores, weights=True)
        if name == "masked_fill" and len(rest) == 2 and _is_minus_infinity(rest[1]):
            return None if scores.mask else replace(scores, mask=_inverted(rest[0]))
        if name in _CASTS and scores is method:
            return scores
        if "drop" in name and scores.weights and not scores.dropout and scores is first:
            return replace(scores, dropout=_dropout(call))
        return None


def _assigned(statement: ast.stmt) -> tuple[str, ast.expr | None]:
    """The only variable that it sets, and to what."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
        value: ast.expr | None = statement.value
    elif isinstance(statement, ast.AugAssign):
        target = statement.target
        if not isinstance(target, ast.Name):
            return "", None
        loaded = ast.copy_location(ast.Name(target.id, ast.Load()), target)
        value = ast.copy_location(ast.BinOp(loaded, statement.op, statement.value), statement)
    else:
        return "", None
    return (target.id, value) if isinstance(target, ast.Name) else ("", None)


def _stored(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id


def _name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _product(node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return node.left, node.right
    if isinstance(node, ast.Call) and _name(node) in _PRODUCTS and not node.keywords:
        if len(node.args) == 2:
            return node.args[0], node.args[1]
        if len(node.args) == 1 and isinstance(node.func, ast.Attribute):
            return node.func.value, node.args[0]
    return None


def _transposed(node: ast.expr) -> ast.expr | None:
    if isinstance(node, ast.Attribute) and node.attr == "mT":
        return node.value
    if not isinstance(node, ast.Call) or _name(node) not in _TRANSPOSES:
        return None
    if not isinstance(node.func, ast.Attribute):
        return None
    is_method = len(node.args) == 2
    try:
        dims = {ast.literal_eval(argument) for argument in node.args[-2:]}
    except ValueError:
        return None
    if dims not in _LAST_TWO:
        return None
    return node.func.value if is_method else node.args[0]


def _is_scale(node: ast.expr) -> bool:
    """A number, a root or something that is called a scale."""
    text = ast.unparse(node).lower()
    if isinstance(node, ast.Constant):
        return True
    return any(word in text for word in ("sqrt", "scal", "**", "temperature"))


def _is_simple(node: ast.expr) -> bool:
    return isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Constant | ast.Subscript)


def _is_last_dim(call: ast.Call, rest: Sequence[ast.expr]) -> bool:
    given = [k.value for k in call.keywords if k.arg == "dim"] or list(rest[:1])
    return len(given) == 1 and ast.unparse(given[0]) == "-1"


def _is_minus_infinity(node: ast.expr) -> bool:
    text = ast.unparse(node)
    if "inf" in text:  # float('-inf'), -math.inf, torch.finfo(...).min
        return "-" in text or text.endswith(".min")
    try:
        return float(ast.literal_eval(node)) <= -1e4
    except (ValueError, TypeError):
        return False


def _inverted(mask: ast.expr) -> str:
    """torch's attention takes what to keep."""
    if isinstance(mask, ast.UnaryOp) and isinstance(mask.op, ast.Invert):
        return ast.unparse(mask.operand)
    text = ast.unparse(mask)
    return f"~{text}" if _is_simple(mask) else f"~({text})"


def _dropout(call: ast.Call) -> str:
    """The share that is dropped, which is 0 in evaluation."""
    function = call.func
    is_module = isinstance(function, ast.Attribute) and ast.unparse(function).startswith("self.")
    if is_module:
        module = ast.unparse(function)
        return f"{module}.p if {module}.training else 0.0"
    given = {k.arg: ast.unparse(k.value) for k in call.keywords if k.arg}
    positions = dict(zip(("p", "training"), map(ast.unparse, call.args[1:]), strict=False))
    both = {"p": "0.5", "training": "True"} | positions | given
    share, training = both["p"], both["training"]
    return share if training == "True" else f"{share} if {training} else 0.0"


# Hand-written attention as one call of torch's; only proposed, never injected.


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


SDPA = Fix(fits=fits, patch=patch)
