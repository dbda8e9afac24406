"""The number in a script's source that sets the batch size, found by its syntax tree."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, NamedTuple

from stepscope.errors import NotCapturedError
from stepscope.records.line_costs import BatchPlace

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


class _Candidate(NamedTuple):
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
    if measured is not None:  # a script may scale it: then no literal equals it
        equal = [one for one in candidates if one.node.value == measured]
        candidates = equal or [one for one in candidates if measured % _value(one) == 0]
    if not candidates:
        return None
    best = min(candidates, key=lambda one: (one.rank, one.node.lineno, one.node.col_offset))
    return _place(text, best)


def text_with_batch(text: str, place: BatchPlace, batch: int) -> str:
    """The source with another batch size. Raises NotCapturedError if the number has moved."""
    lines = text.splitlines(keepends=True)
    line = lines[place.line - 1] if place.line <= len(lines) else ""
    written = line[place.column : place.end_column]
    if not _is_number(written) or int(written, 0) != place.value:
        raise NotCapturedError(
            f"line {place.line} no longer holds the batch size {place.value}: "
            "ask for its place again"
        )
    lines[place.line - 1] = f"{line[: place.column]}{batch}{line[place.end_column :]}"
    return "".join(lines)


def _is_number(text: str) -> bool:
    try:
        int(text, 0)
    except ValueError:
        return False
    return True


def _value(candidate: _Candidate) -> int:
    value = candidate.node.value
    assert isinstance(value, int)
    return value


def _place(text: str, candidate: _Candidate) -> BatchPlace:
    """The tree counts bytes; editors count characters."""
    node = candidate.node
    line = text.splitlines()[node.lineno - 1].encode()
    assert node.end_col_offset is not None
    column, end = (
        len(line[:offset].decode(errors="replace"))
        for offset in (node.col_offset, node.end_col_offset)
    )
    return BatchPlace(
        line=node.lineno,
        column=column,
        end_column=end,
        value=_value(candidate),
        spelling=candidate.spelling,
    )


def _candidates(tree: ast.Module, measured: int | None) -> Iterator[_Candidate]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _of_call(node, measured)
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


def _of_call(call: ast.Call, measured: int | None) -> Iterator[_Candidate]:
    name = _called(call)
    for keyword in call.keywords:
        if keyword.arg is not None:
            rank = 0 if name == _LOADER else 2
            yield from _of_name(keyword.arg, keyword.value, rank, suffix="=")
    if name == _LOADER and len(call.args) > 1 and _is_size(call.args[1]):
        yield _Candidate(0, call.args[1], "the batch size of a DataLoader")  # type: ignore[arg-type]
    if name == "add_argument":
        yield from _of_argument(call)
    if name in _CREATES_INPUT and measured is not None and call.args:
        first = call.args[0]
        first = first.elts[0] if isinstance(first, ast.Tuple | ast.List) and first.elts else first
        if _is_size(first) and isinstance(first, ast.Constant) and first.value == measured:
            yield _Candidate(4, first, f"the first size of {name}")


def _of_argument(call: ast.Call) -> Iterator[_Candidate]:
    """argparse: the default of --batch-size."""
    constants = [one.value for one in call.args if isinstance(one, ast.Constant)]
    flags = [value for value in constants if isinstance(value, str)]
    if not any(_is_batch(flag.lstrip("-")) for flag in flags):
        return
    for keyword in call.keywords:
        if keyword.arg == "default" and _is_size(keyword.value):
            spelling = f"the default of {flags[-1]}"
            yield _Candidate(1, keyword.value, spelling)  # type: ignore[arg-type]


def _of_target(target: ast.expr, value: ast.expr) -> Iterator[_Candidate]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for part, its in zip(target.elts, value.elts, strict=False):
            yield from _of_target(part, its)
    elif isinstance(target, ast.Name):
        yield from _of_name(target.id, value, 1, suffix=" =")
    elif isinstance(target, ast.Attribute):
        yield from _of_name(target.attr, value, 2, suffix=" =")


def _of_defaults(arguments: ast.arguments) -> Iterator[_Candidate]:
    named = [*arguments.posonlyargs, *arguments.args]
    pairs = zip(named[len(named) - len(arguments.defaults) :], arguments.defaults, strict=True)
    for argument, value in (*pairs, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)):
        if value is not None:
            yield from _of_name(argument.arg, value, 3, suffix="=")


def _of_name(name: str, value: ast.expr, rank: int, suffix: str = "") -> Iterator[_Candidate]:
    if _is_batch(name) and _is_size(value):
        yield _Candidate(rank, value, f"{name}{suffix}")  # type: ignore[arg-type]


def _is_batch(name: str) -> bool:
    plain = name.replace("-", "_").lower()
    return bool(_NAME.search(plain)) and not _NOT_TRAINING.search(plain)


def _is_size(value: ast.expr) -> bool:
    """A whole number that a batch can have, as a literal."""
    return isinstance(value, ast.Constant) and type(value.value) is int and value.value > 0


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
