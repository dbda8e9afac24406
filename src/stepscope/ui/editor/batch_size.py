"""Find the number that sets a script's batch size, here or in another file, and predict the
step at other batch sizes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from stepscope.errors import NotCapturedError, StepscopeError, UsageError
from stepscope.records.prediction import Prediction, Setting, TrackedPromise
from stepscope.records.source_lines import (
    BatchElsewhere,
    BatchPlace,
    BatchPoint,
    LineCost,
    LineCosts,
)
from stepscope.trace.files import is_folder, list_folder, may_exist, read_whole
from stepscope.ui.editor.edits import follow, source_lines, text_lines

if TYPE_CHECKING:
    from stepscope.predict.engine import Bench

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
    """Return the literal that holds the batch size; None if none does or the text cannot be parsed.

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
    """Return the numbers behind names that are bound once in the whole script."""
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
    """Return the number itself where a name stands for it."""
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
    """Return whether something of this name is the size of a training batch."""
    plain = name.replace("-", "_").lower()
    return bool(_NAME.search(plain)) and not _NOT_TRAINING.search(plain)


def is_not_for_training(section: str) -> bool:
    """Return whether settings under this heading are those of an evaluation."""
    return bool(_NOT_TRAINING.search(section.replace("-", "_").lower()))


def _is_size(value: ast.expr) -> bool:
    """Return a whole number that a batch can have, as a literal."""
    return isinstance(value, ast.Constant) and type(value.value) is int and value.value > 0


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


# The batch size of a script that takes it from another file: settings, or a module of its own.

_SETTINGS = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg")
_FOLDERS = ("conf", "config", "configs", "cfg", "settings")
_MOST_FILES = 100
_MOST_BYTES = 1 << 20
# "batch_size": 64, batch_size = 64, train.batch-size: 64
_SETTING = re.compile(r"""([A-Za-z_][\w.-]*)["']?\s*[:=]\s*(\d[\d_]*)(?![\w.])""")
# [validation], "validation": {, validation:
_SECTION = re.compile(r"""^\s*\[*["']?([A-Za-z_][\w.-]*)["']?\s*(?:\]+|[:=]\s*\{?)\s*$""")


def batch_elsewhere(script: Path, text: str, costs: LineCosts) -> BatchElsewhere | None:
    """Return None if no file that the script may read holds a number that fits the measured
    batch.
    """
    measured = costs.batch
    if measured is None:
        return None
    numbers = [
        number
        for file in islice(dict.fromkeys(_files(script, text)), _MOST_FILES)
        for number in _numbers(file, costs)
    ]
    equal = [number for number in numbers if number.value == measured]
    divides = [one for one in numbers if one.value > 1 and measured % one.value == 0]
    return next(iter([*equal, *divides]), None)


def _files(script: Path, source: str) -> Iterator[Path]:
    """Files that the script names, its modules, then settings beside it: the likeliest first."""
    home = script.parent
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        nodes = []
    for text in (node.value for node in nodes if isinstance(node, ast.Constant)):
        if isinstance(text, str) and text.endswith(_SETTINGS) and "\n" not in text:
            yield from filter(may_exist, (home / text, home.parent / text))
    for module in _modules(nodes):
        package = home.joinpath(*module.split("."))
        yield from filter(may_exist, (package.with_suffix(".py"), package / "__init__.py"))
    for folder in (home, *(home / name for name in _FOLDERS)):
        if is_folder(folder):
            yield from sorted(file for file in list_folder(folder) if file.suffix in _SETTINGS)


def _modules(nodes: list[ast.AST]) -> Iterator[str]:
    """Return every module that is imported; `from config import train` may name one, too."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = f"{node.module}." if node.module else ""
            if node.module:
                yield node.module
            yield from (f"{package}{alias.name}" for alias in node.names if alias.name != "*")


def _numbers(file: Path, costs: LineCosts) -> Iterator[BatchElsewhere]:
    try:
        text = read_whole(file, _MOST_BYTES).decode(errors="replace")
    except StepscopeError:
        return
    if file.suffix == ".py":
        place = batch_in_source(text, costs)
        if place is not None:
            yield BatchElsewhere(
                file=str(file), line=place.line, name=place.spelling, value=place.value
            )
        return
    yield from _settings(file, text)


def _settings(file: Path, text: str) -> Iterator[BatchElsewhere]:
    section = ""
    for line, words in enumerate(text.split("\n"), 1):
        if words.lstrip().startswith(("#", ";", "//")):
            continue
        if heading := _SECTION.match(words):
            section = heading[1]
        for setting in _SETTING.finditer(words):
            if is_batch_name(setting[1].replace(".", "_")) and not is_not_for_training(section):
                value = int(setting[2])
                yield BatchElsewhere(file=str(file), line=line, name=setting[1], value=value)


# The step at other batch sizes, predicted from one run, and the way back for dragging.

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def batch_curve(
    run: Path,
    batches: Iterable[int] | None = None,
    *,
    batch: int | None = None,
    samples: int | None = None,
) -> tuple[BatchPoint, ...]:
    """What-if at each batch size, smallest first; without `batches`, a quarter to eight times.

    `batch` is the measured one, for a run whose trace does not show it; `samples` are those of the
    measured step of one rank, if they are not its batches as the trace shows them. Raises
    NotCapturedError when the batch is not known, or when the step cannot be predicted.
    """
    from stepscope.ui.advice import open_slowest
    from stepscope.verify.track_record import history

    bench, rank, _ = open_slowest(str(run), cache=True)
    now = batch or bench.context.batch
    if now is None:
        raise NotCapturedError(f"{run} does not show its batch size: give it yourself")
    reading = bench.context.batch_reading
    samples = samples or now * ((reading.per_step if reading else None) or 1)
    per_batch = max(1, rank.world_size or 1) * samples / now
    wanted = sorted({max(1, round(now * f)) for f in FACTORS} if batches is None else set(batches))
    if not wanted or wanted[0] < 1:
        raise UsageError("a batch has at least one sample")
    promises = history()
    return tuple(_point(bench, now, one, per_batch, promises) for one in wanted)


def _point(
    bench: Bench, now: int, batch: int, per_batch: float, promises: Sequence[TrackedPromise]
) -> BatchPoint:
    from stepscope.ui.topics.whatif import adjusted

    if batch == now:
        return _as_point(bench.predict([]), batch, per_batch)
    setting = Setting(name="batch", value=f"x{batch / now:.9f}")
    prediction = bench.predict([setting])
    if not prediction.applied:
        raise NotCapturedError("; ".join(dict.fromkeys(prediction.refused)))
    return _as_point(adjusted(prediction, promises), batch, per_batch)


def _as_point(step: Prediction, batch: int, per_batch: float) -> BatchPoint:
    """`per_batch`: samples of all ranks' step over `batch`."""
    return BatchPoint(
        batch=batch,
        step_ms=step.predicted_ms,
        low_ms=step.low_ms,
        high_ms=step.high_ms,
        samples_per_second=per_batch * batch / step.predicted_ms * 1e3,
        peak_bytes=step.peak_bytes,
        peak_low_bytes=step.peak_low_bytes,
        peak_high_bytes=step.peak_high_bytes,
    )


def batch_for(
    curve: Sequence[BatchPoint],
    *,
    samples_per_second: float | None = None,
    peak_bytes: int | None = None,
) -> BatchPoint:
    """Return the batch whose predicted throughput or peak comes nearest, between the curve's
    ends.
    """
    if not curve:
        raise UsageError("the curve holds no batch size")
    if (samples_per_second is None) == (peak_bytes is None):
        raise UsageError("give samples_per_second or peak_bytes, one of them")
    if samples_per_second is not None:
        return _nearest(curve, lambda point: point.samples_per_second, samples_per_second)
    if any(point.peak_bytes is None for point in curve):
        raise NotCapturedError(
            "the peak at other batch sizes is not known: memory was not captured"
        )
    assert peak_bytes is not None
    return _nearest(curve, lambda point: float(point.peak_bytes or 0), float(peak_bytes))


def _nearest(
    curve: Sequence[BatchPoint], amount: Callable[[BatchPoint], float], wanted: float
) -> BatchPoint:
    """Straight lines join the points; of equally near batches, the smallest."""
    best = min(curve, key=lambda point: (abs(amount(point) - wanted), point.batch))
    for left, right in pairwise(curve):
        low, high = sorted((amount(left), amount(right)))
        if not low <= wanted <= high or low == high:
            continue
        part = (wanted - amount(left)) / (amount(right) - amount(left))
        return between(left, right, round(left.batch + part * (right.batch - left.batch)))
    return best


def between(left: BatchPoint, right: BatchPoint, batch: int) -> BatchPoint:
    """Return the point at `batch` on the straight line through two others."""
    part = (batch - left.batch) / (right.batch - left.batch)

    def mixed(a: float, b: float) -> float:
        return a + part * (b - a)

    def mixed_bytes(a: int | None, b: int | None) -> int | None:
        return None if a is None or b is None else round(mixed(a, b))

    return BatchPoint(
        batch=batch,
        step_ms=mixed(left.step_ms, right.step_ms),
        low_ms=mixed(left.low_ms, right.low_ms),
        high_ms=mixed(left.high_ms, right.high_ms),
        samples_per_second=mixed(left.samples_per_second, right.samples_per_second),
        peak_bytes=mixed_bytes(left.peak_bytes, right.peak_bytes),
        peak_low_bytes=mixed_bytes(left.peak_low_bytes, right.peak_low_bytes),
        peak_high_bytes=mixed_bytes(left.peak_high_bytes, right.peak_high_bytes),
    )


# The number that sets the batch size, in a script that may have been edited since it was measured.
#
# Another literal may equal the measured batch by chance: so the number is looked for in the
# measured text, and its line is followed.

_WHOLE_NUMBER = re.compile(r"(?<![\w.])\d[\d_]*(?![\w.])")


def batch_now(costs: LineCosts, script: Path, text: str) -> BatchPlace | None:
    """Return None if no number of the text can be told to be the batch size."""
    before = costs.texts.get(str(script))
    place = batch_in_source(before, costs) if before is not None else None
    if before is None or place is None:
        return batch_in_source(text, costs)
    spots = [(place.line, place.column), *(spot[:2] for spot in place.also)]
    lines = tuple(LineCost(file=str(script), line=line, function="") for line, _ in spots)
    followed = follow(replace(costs, lines=lines), script, text).lines
    if followed[0].line is None:
        return batch_in_source(text, costs)
    old, new = ([*text_lines(lines), ""] for lines in (before, text))
    numbers = [
        _same_number(old[line - 1], column, new[now.line - 1], now.line)
        for (line, column), now in zip(spots, followed, strict=True)
        if now.line is not None
    ]
    first = numbers[0]
    if first is None:
        return None
    also = [one for one in numbers[1:] if one is not None and one.value == first.value]
    return BatchPlace(
        line=first.line,
        column=first.column,
        end_column=first.end,
        value=first.value,
        spelling=place.spelling,
        also=tuple((one.line, one.column, one.end) for one in also),
    )


class _BatchNumber(NamedTuple):
    line: int
    column: int
    end: int
    value: int


def _same_number(before: str, column: int, now: str, line: int) -> _BatchNumber | None:
    """Return the number at the same place among the line's numbers."""
    old, new = list(_WHOLE_NUMBER.finditer(before)), list(_WHOLE_NUMBER.finditer(now))
    order = next((n for n, one in enumerate(old) if one.start() == column), None)
    if order is None or len(old) != len(new) or int(new[order][0]) < 1:
        return None
    return _BatchNumber(line, new[order].start(), new[order].end(), int(new[order][0]))
