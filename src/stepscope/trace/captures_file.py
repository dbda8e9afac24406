"""graphs.jsonl: the operators that CUDA graphs recorded while they were captured."""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec.structs import replace

from stepscope.records.compiled import CapturedGraph, CapturedOperator
from stepscope.records.place import Place
from stepscope.trace.decode import Oddities
from stepscope.trace.regular_files import LineFile
from stepscope.trace.side_files import read_row_batches

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.quality import Note

GRAPHS = "graphs.jsonl"
_MAX_LINE_BYTES = 24 << 20
_MAX_TEXT_BYTES = 256 << 20  # of one capture, unpacked
# Torch's names of dtypes: the profiler's.
_DTYPES = {
    "float64": "double",
    "float32": "float",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "float8_e4m3fn": "c10::Float8_e4m3fn",
    "float8_e5m2": "c10::Float8_e5m2",
    "int64": "long int",
    "int32": "int",
    "int16": "short",
    "int8": "signed char",
    "uint8": "unsigned char",
    "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>",
}
_LineNumber = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
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
    """Of a rank's folder, in the order of the captures; none where nothing was captured."""
    oddities = Oddities(GRAPHS)
    lines = LineFile(folder / GRAPHS, max_line_bytes=_MAX_LINE_BYTES)
    rows = [row for batch in read_row_batches(lines, _CaptureLine, oddities) for row in batch]
    captures = [_capture(row, oddities) for row in rows if row.what == "capture"]
    return tuple(one for one in captures if one.operators), oddities.notes


def _capture(line: _CaptureLine, oddities: Oddities) -> CapturedGraph:
    try:
        rows = msgspec.json.decode(_unpacked(line.operators), type=list[_Row])
        where = _CaptureLines()
        if line.where:
            where = msgspec.json.decode(_unpacked(line.where), type=_CaptureLines)
        operators = tuple(_operator(*row) for row in rows)
        return CapturedGraph(operators=_with_lines(operators, where))
    except (binascii.Error, ValueError, zlib.error, msgspec.MsgspecError) as error:
        oddities.add("a capture's operators", str(error))
        return CapturedGraph()


def _unpacked(text: str) -> bytes:
    data = zlib.decompressobj()
    return data.decompress(base64.b64decode(text, validate=True), _MAX_TEXT_BYTES)


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
        dtypes=[_DTYPES.get(dtype, dtype) for dtype in dtypes],
        concrete=concrete,
        backward=backward,
    )
