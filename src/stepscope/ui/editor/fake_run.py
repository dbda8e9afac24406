"""A script's steps with fake tensors, run in a process of their own within a time limit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stepscope.errors import NotCapturedError, UnreadableInputError
from stepscope.trace.regular_files import read_whole
from stepscope.ui.editor.warm_python import warm_python

if TYPE_CHECKING:
    import threading

_MOST_ANSWER = 64 << 20
_LATER_S = 10.0  # the script ends by itself if we cannot end it


class LineCall(msgspec.Struct, frozen=True):
    """Calls of an operator, with the line that they belong to."""

    file: str
    line: int
    function: str
    phase: str
    name: str
    shapes: list[list[int]]
    dtypes: list[str]
    count: int


class FakeAnswer(msgspec.Struct, frozen=True):
    """What the child found, or why it found nothing."""

    failed: str | None = None
    calls: list[LineCall] = []
    kept: list[tuple[str, int, int]] = []  # file, line, bytes
    parameter_bytes: int = 0


class FakeScript(NamedTuple):
    """A script as the editor has it; `texts` are its own and those of files that it imports."""

    script: Path
    texts: tuple[tuple[str, str], ...]  # by resolved path
    arguments: tuple[str, ...]
    python: str
    cwd: Path


def run_with_fakes(
    script: FakeScript, limit_s: float, stop: threading.Event | None = None
) -> FakeAnswer:
    """Raises NotCapturedError if it cannot be run so, and says why; `stop` ends it early."""
    name = script.script.name
    with tempfile.TemporaryDirectory(prefix="stepscope-") as place:
        request, answer, errors = (Path(place) / part for part in ("request", "answer", "errors"))
        content = {
            "script": str(script.script),
            "texts": dict(script.texts),
            "arguments": script.arguments,
            "cwd": str(script.cwd),
            "limit_s": limit_s + _LATER_S,
            "answer": str(answer),
            "errors": str(errors),
        }
        request.write_bytes(msgspec.json.encode(content))
        warm_python(script.python).run(request, name, limit_s, stop)
        return _read(answer, errors, name)


def _read(path: Path, errors: Path, name: str) -> FakeAnswer:
    try:
        answer = msgspec.json.decode(read_whole(path, _MOST_ANSWER), type=FakeAnswer)
    except (UnreadableInputError, msgspec.MsgspecError):
        why = "; ".join(_last_lines(errors)) or "it ended without an answer"
        raise NotCapturedError(f"{name} cannot be estimated: {why}") from None
    if answer.failed:
        raise NotCapturedError(f"{name} cannot be estimated with fake tensors: {answer.failed}")
    return answer


def _last_lines(errors: Path) -> list[str]:
    try:
        return read_whole(errors, _MOST_ANSWER).decode(errors="replace").splitlines()[-3:]
    except UnreadableInputError:
        return []
