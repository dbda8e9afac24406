"""The number in a script's source that sets the batch size, found by its syntax tree."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, NamedTuple

from stepscope.errors import NotCapturedError
from stepscope.records.line_costs import BatchPlace
from stepscope.ui.editor.follow import source_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.records.line_costs import LineCosts

# batch_size, BATCH, bs, per_device_train_batch_size, --batch-size; not n_batches, eval_batch_size.
_NAME = re.compile(
    r"(?:^|_)(?:batch_?size|batchsize|bsz?|batch)(?:_?(?:train|per_(?:gpu|device)))?$"
)
_NOT_TRAINING = re.compile(r"eval|val(?:id)?(?:ation)?(?:_|$)|test|num|infer|predict|log|(?:^|_)n_")
_CREATES_INPUT = frozenset({"randn", "rand", "randint", "zeros", "ones", "empty", "full"})
_LOADER = "DataLoader"
_NAMED = 1  # a DataLoader's, an argument's default, a name of its own
_SIZE = 4  # less sure: a number that only equals the measured batch
_NAMED_SIZE = 5  # the least sure: such a number behind a name that may be of anything


Literals = dict[str, ast.Constant]  # by the names of which each is the only value


class _Number(NamedTuple):
    rank: int  # how sure it is: low first
    node: ast.Constant
    spelling: str


def batch_in_source(text: str, costs: LineCosts | None) -> BatchPlace | None:
    """The literal that holds the batch size; None if none does or the text cannot be parsed.

    A literal that equals the measured batch comes before one that does not.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    measured = costs.batch if costs is not None else None
    candidates = list(_candidates(tree, measured))
    if measured is not None:
        candidates = _likeliest(candidates, measured)
    if not candidates:
        return None
    candidates.sort(key=lambda one: (one.rank, one.node.lineno, one.node.col_offset))
    best, *others = candidates
    if best.rank == _SIZE:  # inputs and targets are created with the same number
        again = [one for one in others if one.rank == _SIZE and one.node.value == best.node.value]
        return _place(text, best, again)
    if best.rank == _NAMED_SIZE and any(one.node is not best.node for one in others):
        return None  # the width of a layer may equal the batch
    return _place(text, best, [])


def _likeliest(candidates: list[_Number], measured: int) -> list[_Number]:
    """Those that equal the measured batch; a script may also multiply its number by something.

    Where samples are not the first dimension, the measured batch is another dimension: a number
    with a name of its own is then the batch size, whatever it is. A one divides everything.
    """
    equal = [one for one in candidates if one.node.value == measured]
    divides = [one for one in candidates if _value(one) > 1 and measured % _value(one) == 0]
    named = [one for one in candidates if one.rank <= _NAMED]
    return equal or [one for one in divides if one in named] or named or divides


def text_with_batch(text: str, place: BatchPlace, batch: int) -> str:
    """The source with another batch size. Raises NotCapturedError if the number has moved."""
    lines = text.split("\n")  # carriage returns stay where they are
    spots = [(place.line, place.column, place.end_column), *place.also]
    for number, column, end in sorted(spots, reverse=True):  # the last one first: columns shift
        line = lines[number - 1] if number <= len(lines) else ""
        written = line[column:end]
        if not _is_number(written) or int(written, 0) != place.value:
            raise NotCapturedError(
                f"line {number} no longer holds the batch size {place.value}: "
                "ask for its place again"
            )
        lines[number - 1] = f"{line[:column]}{batch}{line[end:]}"
    return "\n".join(lines)


def _is_number(text: str) -> bool:
    try:
        int(text, 0)
    except ValueError:
        return False
    return True


def _value(candidate: _Number) -> int:
    value = candidate.node.value
    assert isinstance(value, int)
    return value


def _place(text: str, candidate: _Number, others: list[_Number]) -> BatchPlace:
    lines = source_lines(text)
    line, column, end = _spot(lines, candidate.node)
    return BatchPlace(
        line=line,
        column=column,
        end_column=end,
        value=_value(candidate),
        spelling=candidate.spelling,
        also=tuple(_spot(lines, one.node) for one in others),
    )


def _spot(lines: list[str], node: ast.Constant) -> tuple[int, int, int]:
    """Line, column and end. The tree counts bytes; editors count characters."""
    line = lines[node.lineno - 1].encode()
    assert node.end_col_offset is not None
    column, end = (
        len(line[:offset].decode(errors="replace"))
        for offset in (node.col_offset, node.end_col_offset)
    )
    return node.lineno, column, end


def _candidates(tree: ast.Module, measured: int | None) -> Iterator[_Number]:
    literals = _only_values(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _of_call(node, measured, literals)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _of_target(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from _of_target(node.target, node.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _of_defaults(node.args)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield from _of_name(key.value, value, 3)


def _only_values(tree: ast.Module) -> Literals:
    """The numbers behind names that are bound once in the whole script."""
    bound = [
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    ]
    parameters = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
        and _is_size(node.value)
        and bound.count(target.id) == 1
        and target.id not in parameters
    }


def _literal(value: ast.expr | None, literals: Literals) -> ast.expr | None:
    """The number itself where a name stands for it."""
    return literals.get(value.id, value) if isinstance(value, ast.Name) else value


def _of_call(call: ast.Call, measured: int | None, literals: Literals) -> Iterator[_Number]:
    name = _called(call)
    for keyword in call.keywords:
        if keyword.arg is not None:
            rank = 0 if name == _LOADER else 2
            value = _literal(keyword.value, literals)
            yield from _of_name(keyword.arg, value or keyword.value, rank, suffix="=")
    if name == _LOADER and len(call.args) > 1:
        size = _literal(call.args[1], literals)
        if isinstance(size, ast.Constant) and _is_size(size):
            yield _Number(0, size, "the batch size of a DataLoader")
    if name == "add_argument":
        yield from _of_argument(call)
    if name in _CREATES_INPUT and measured is not None:
        written = _first_size(call)
        first = _literal(written, literals)
        if isinstance(first, ast.Constant) and _is_size(first) and first.value == measured:
            rank = _SIZE if first is written else _NAMED_SIZE
            yield _Number(rank, first, f"the first size of {name}")


def _first_size(call: ast.Call) -> ast.expr | None:
    """randn(64, 10), randn((64, 10)), randint(0, 10, (64,)), zeros(size=(64, 10))."""
    sizes = [*call.args, *(one.value for one in call.keywords if one.arg == "size")]
    for size in sizes:
        if isinstance(size, ast.Tuple | ast.List) and size.elts:
            return size.elts[0]
    return None if _called(call) == "randint" else next(iter(call.args), None)


def _of_argument(call: ast.Call) -> Iterator[_Number]:
    """argparse: the default of --batch-size."""
    constants = [one.value for one in call.args if isinstance(one, ast.Constant)]
    flags = [value for value in constants if isinstance(value, str)]
    if not any(is_batch_name(flag.lstrip("-")) for flag in flags):
        return
    for keyword in call.keywords:
        if keyword.arg == "default" and _is_size(keyword.value):
            spelling = f"the default of {flags[-1]}"
            yield _Number(1, keyword.value, spelling)  # type: ignore[arg-type]


def _of_target(target: ast.expr, value: ast.expr) -> Iterator[_Number]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for part, its in zip(target.elts, value.elts, strict=False):
            yield from _of_target(part, its)
    elif isinstance(target, ast.Name):
        yield from _of_name(target.id, value, 1, suffix=" =")
    elif isinstance(target, ast.Attribute):
        yield from _of_name(target.attr, value, 2, suffix=" =")


def _of_defaults(arguments: ast.arguments) -> Iterator[_Number]:
    named = [*arguments.posonlyargs, *arguments.args]
    pairs = zip(named[len(named) - len(arguments.defaults) :], arguments.defaults, strict=True)
    for argument, value in (*pairs, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)):
        if value is not None:
            yield from _of_name(argument.arg, value, 3, suffix="=")


def _of_name(name: str, value: ast.expr, rank: int, suffix: str = "") -> Iterator[_Number]:
    if is_batch_name(name) and _is_size(value):
        yield _Number(rank, value, f"{name}{suffix}")  # type: ignore[arg-type]


def is_batch_name(name: str) -> bool:
    """Whether something of this name is the size of a training batch."""
    plain = name.replace("-", "_").lower()
    return bool(_NAME.search(plain)) and not _NOT_TRAINING.search(plain)


def is_not_for_training(section: str) -> bool:
    """Whether settings under this heading are those of an evaluation."""
    return bool(_NOT_TRAINING.search(section.replace("-", "_").lower()))


def _is_size(value: ast.expr) -> bool:
    """A whole number that a batch can have, as a literal."""
    return isinstance(value, ast.Constant) and type(value.value) is int and value.value > 0


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
