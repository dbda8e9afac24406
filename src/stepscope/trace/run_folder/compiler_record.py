"""Read what capture kept of torch.compile (compiler.jsonl) and of the operators that CUDA
graphs captured (graphs.jsonl).
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from stepscope.records.compiled import (
    CapturedGraph,
    CapturedOperator,
    Compilation,
    CompiledGraph,
    CompilerRecord,
    GraphBreak,
)
from stepscope.records.dtypes import BY_NAME
from stepscope.records.quality import Note
from stepscope.records.source_lines import Place
from stepscope.trace.decode import Oddities, read_row_batches
from stepscope.trace.files import LineFile

COMPILER = "compiler.jsonl"
_COMPILED_AUTOGRAD = "!"  # how the ids of its compilations begin; its graphs are backward passes
_MAX_LINE_BYTES = 24 << 20
_MAX_TEXT_BYTES = 64 << 20  # of one graph, unpacked
_LineNumber = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
_Microseconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 56)]
_Hits = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
# `4/1: s.flag == 1.0     # h = s.block(h) * s.flag  # train.py:21 in forward`, and a stack below it
_GUARD = re.compile(r"^(?:\d+/\d+:\s*)?(?P<guard>.*?)(?:\s{2,}#.*|\s+#\s.*)?$")
_STACK_LINE = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.M)
# In brackets is a line of torch's own: `# (_dynamo/output_graph.py:3375 in remove_graphargs)`.
_COMMENT_LINE = re.compile(r"#\s(?P<file>[^\s(]\S*):(?P<line>\d+) in (?P<function>\S+)\s*$", re.M)
_TORCH = re.compile(r"(site|dist)-packages[/\\]torch[/\\]|[/\\]torch[/\\]_\w+[/\\]")
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(?P<function>.+)_at_\d+$")


class _CompilerLine(msgspec.Struct, frozen=True, kw_only=True):
    """Any of the three kinds of lines."""

    what: str = ""
    compile_id: str | None = None
    key: str | None = None
    backward: bool | None = None
    devices: list[str] = []
    not_graphed: str | None = None
    operators: str | None = None
    code: str | None = None
    reason: str | None = None
    frames: list[tuple[str, _LineNumber, str]] = []
    co_name: str | None = None
    co_filename: str | None = None
    co_firstlineno: _LineNumber | None = None
    caller: tuple[str, _LineNumber, str] | None = None
    is_forward: bool | None = None
    start_time_us: _Microseconds | None = None
    duration_us: _Microseconds | None = None
    start_time: _Seconds | None = None
    entire_frame_compile_time_s: _Seconds | None = None
    backward_cumulative_compile_time_us: _Microseconds | None = None
    recompile_reason: str | None = None
    fail_type: str | None = None
    fail_reason: str | None = None
    fail_user_frame_filename: str | None = None
    fail_user_frame_lineno: _LineNumber | None = None
    inductor_fx_local_cache_hit_count: _Hits | None = None
    inductor_fx_local_cache_miss_count: _Hits | None = None
    aotautograd_local_cache_hit_count: _Hits | None = None
    aotautograd_local_cache_miss_count: _Hits | None = None


def read_compiler_record(folder: Path) -> tuple[CompilerRecord | None, tuple[Note, ...]]:
    """Read a rank's compiler.jsonl; None where nothing was compiled or captured of it."""
    oddities = Oddities(COMPILER)
    lines = LineFile(folder / COMPILER, max_line_bytes=_MAX_LINE_BYTES)
    rows = [row for batch in read_row_batches(lines, _CompilerLine, oddities) for row in batch]
    if not rows:
        return None, oddities.notes
    graphs = {row.key: _graph(row, row.key, oddities) for row in rows if row.key}
    record = CompilerRecord(
        graphs=tuple(graphs.values()),
        compilations=tuple(_compilation(row) for row in rows if row.what == "compilation"),
        breaks=_breaks([row for row in rows if row.what == "break"]),
    )
    return record, oddities.notes


def _graph(row: _CompilerLine, key: str, oddities: Oddities) -> CompiledGraph:
    from stepscope.trace.run_folder.graph_text import read_graph
    from stepscope.trace.run_folder.inductor_code import read_kernels

    operators = _unpacked(row.operators, oddities)
    code = _unpacked(row.code, oddities)
    return CompiledGraph(
        key=key,
        region=row.compile_id,
        backward=bool(row.backward) or (row.compile_id or "").startswith(_COMPILED_AUTOGRAD),
        devices=tuple(row.devices),
        not_graphed=row.not_graphed,
        operators=read_graph(operators),
        kernels=read_kernels(operators, code),
    )


def _unpacked(text: str | None, oddities: Oddities) -> str:
    if not text:
        return ""
    try:
        data = zlib.decompressobj()
        whole = data.decompress(base64.b64decode(text, validate=True), _MAX_TEXT_BYTES)
        return whole.decode("utf-8", "replace")
    except (binascii.Error, ValueError, zlib.error) as error:
        oddities.add("a graph's text", str(error))
        return ""


def _compilation(row: _CompilerLine) -> Compilation:
    failed = row.fail_reason or row.fail_type
    place = None
    function, place = plain_name(row.co_name) or None, _place(row)
    if row.caller is not None and _is_torchs(row):
        function = row.caller[2]
    guard, guard_place = _guard(row.recompile_reason)
    return Compilation(
        region=row.compile_id,
        function=function,
        place=place or guard_place,
        seconds=_seconds(row),
        began_unix_s=row.start_time
        if row.start_time is not None
        else row.start_time_us / 1e6
        if row.start_time_us is not None
        else None,
        cached=_cached(row),
        again=row.recompile_reason is not None or _is_again(row.compile_id),
        guard=guard,
        guard_place=guard_place,
        failed=failed.split("\n", 1)[0] if failed else None,
    )


def _place(row: _CompilerLine) -> Place | None:
    """Dynamo may compile a function of torch's own around the user's: then the user's line that
    called it."""
    if _is_torchs(row):
        if row.caller is None:
            return None
        file, line, function = row.caller
        return Place(file=file, line=line, function=function)
    if row.co_filename:
        name = plain_name(row.co_name)
        return Place(file=row.co_filename, line=row.co_firstlineno or 0, function=name)
    if row.fail_user_frame_filename:
        return Place(file=row.fail_user_frame_filename, line=row.fail_user_frame_lineno or 0)
    return None


def _is_torchs(row: _CompilerLine) -> bool:
    return _TORCH.search(row.co_filename or "") is not None


def _seconds(row: _CompilerLine) -> float | None:
    for us in (row.duration_us, row.backward_cumulative_compile_time_us):
        if us:
            return us / 1e6
    return row.entire_frame_compile_time_s


def _is_again(compile_id: str | None) -> bool:
    """`3/1` is the second compilation of the fourth function."""
    return (
        compile_id is not None
        and compile_id.rpartition("/")[2].isdecimal()
        and (int(compile_id.rpartition("/")[2]) > 0)
    )


def _cached(row: _CompilerLine) -> bool | None:
    hits, misses = row.inductor_fx_local_cache_hit_count, row.inductor_fx_local_cache_miss_count
    if hits is None or misses is None or not hits + misses:
        return None
    return misses == 0


def plain_name(name: str | None) -> str:
    """Functions that continue after a graph break have the name of what they continue."""
    match = _RESUMED.match(name or "")
    return match["function"] if match else name or ""


def _guard(reason: str | None) -> tuple[str | None, Place | None]:
    if not reason:
        return None, None
    first = reason.split("\n", 1)[0]
    match = _GUARD.match(first)
    guard = match["guard"].strip() if match else first
    stack = list(_STACK_LINE.finditer(reason)) or list(_COMMENT_LINE.finditer(first))
    if not stack:
        return guard, None
    last = stack[-1]
    function = plain_name(last["function"].strip())
    return guard, Place(file=last["file"], line=int(last["line"]), function=function)


def _breaks(rows: list[_CompilerLine]) -> tuple[GraphBreak, ...]:
    """One for each line and reason, however often it was compiled."""
    found: dict[tuple[str, str, int], list[_CompilerLine]] = {}
    for row in (_explained(row, rows) for row in rows):
        file, line, _ = row.frames[-1] if row.frames else ("", 0, "")
        found.setdefault((_headline(row.reason), file, line), []).append(row)
    return tuple(_break(reason, same) for (reason, _, _), same in found.items())


def _explained(row: _CompilerLine, rows: list[_CompilerLine]) -> _CompilerLine:
    """Dynamo gives no reason where a frame stops at a call that broke inside: that break has it."""
    if not (row.reason or "").startswith(_NO_REASON) or not row.frames:
        return row
    at = tuple(row.frames[-1][:2])
    for other in rows:
        if at in [tuple(frame[:2]) for frame in other.frames[:-1]]:
            return replace(row, reason=other.reason, frames=other.frames)
    return row


def _break(reason: str, rows: list[_CompilerLine]) -> GraphBreak:
    frames = rows[0].frames
    places = [Place(file=file, line=line, function=plain_name(name)) for file, line, name in frames]
    return GraphBreak(
        reason=reason,
        hint=_hint(rows[0].reason or ""),
        place=places[-1] if places else None,
        function=places[0] if places else None,
        regions=tuple(dict.fromkeys(row.compile_id for row in rows if row.compile_id)),
        times=len(rows),
    )


_JUMP, _NO_REASON = "generic_jump", "step_unsupported"


def _headline(reason: str | None) -> str:
    first = (reason or "not known").strip(" '\n").split("\n", 1)[0].rstrip(".")
    if first.startswith(_NO_REASON):
        return "dynamo cannot trace this line"
    return "a branch that depends on a tensor's value" if first.startswith(_JUMP) else first


def _hint(reason: str) -> str:
    hints = [line.strip() for line in reason.split("\n") if line.strip().startswith("Hint:")]
    return hints[0].removeprefix("Hint:").strip() if hints else ""


# graphs.jsonl: the operators that CUDA graphs recorded while they were captured.

GRAPHS = "graphs.jsonl"
_MAX_CAPTURE_BYTES = 256 << 20  # of one capture, unpacked
_Row = tuple[str, list[Any], list[str], list[str], bool]


class _CaptureLine(msgspec.Struct, frozen=True, kw_only=True):
    what: str = ""
    count: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)] = 0
    operators: str = ""
    where: str = ""  # older captures have no lines


class _CaptureLines(msgspec.Struct, frozen=True, kw_only=True):
    """The source line of each operator, and whether an optimizer's step ran it."""

    places: list[tuple[str, _LineNumber, str] | None] = []
    at: list[int] = []
    optimizer: list[bool] = []


def read_captures(folder: Path) -> tuple[tuple[CapturedGraph, ...], tuple[Note, ...]]:
    """Read a rank's captures in their order; none where nothing was captured."""
    oddities = Oddities(GRAPHS)
    lines = LineFile(folder / GRAPHS, max_line_bytes=_MAX_LINE_BYTES)
    rows = [row for batch in read_row_batches(lines, _CaptureLine, oddities) for row in batch]
    captures = [_capture(row, oddities) for row in rows if row.what == "capture"]
    return tuple(one for one in captures if one.operators), oddities.notes


def _capture(line: _CaptureLine, oddities: Oddities) -> CapturedGraph:
    try:
        rows = msgspec.json.decode(_unpacked_capture(line.operators), type=list[_Row])
        where = _CaptureLines()
        if line.where:
            where = msgspec.json.decode(_unpacked_capture(line.where), type=_CaptureLines)
        operators = tuple(_operator(*row) for row in rows)
        return CapturedGraph(operators=_with_lines(operators, where))
    except (binascii.Error, ValueError, zlib.error, msgspec.MsgspecError) as error:
        oddities.add("a capture's operators", str(error))
        return CapturedGraph()


def _unpacked_capture(text: str) -> bytes:
    data = zlib.decompressobj()
    return data.decompress(base64.b64decode(text, validate=True), _MAX_CAPTURE_BYTES)


def _with_lines(
    operators: tuple[CapturedOperator, ...], where: _CaptureLines
) -> tuple[CapturedOperator, ...]:
    if len(where.at) != len(operators) or len(where.optimizer) != len(operators):
        return operators
    places = [
        None if one is None else Place(file=one[0], line=one[1], function=one[2])
        for one in where.places
    ]
    return tuple(
        replace(one, place=places[at] if 0 <= at < len(places) else None, optimizer=stepping)
        for one, at, stepping in zip(operators, where.at, where.optimizer, strict=True)
    )


def _operator(
    name: str, shapes: list[Any], dtypes: list[str], concrete: list[str], backward: bool
) -> CapturedOperator:
    return CapturedOperator(
        name=name,
        shapes=shapes,
        dtypes=[BY_NAME[dtype].profiler[0] if dtype in BY_NAME else dtype for dtype in dtypes],
        concrete=concrete,
        backward=backward,
    )
