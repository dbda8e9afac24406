"""JSON that stepscope writes: `--json`, one object on stdout that is safe in a terminal whatever
names it holds, also when there is no answer; and journals, one line each for what is done.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import click

from stepscope.errors import StepscopeError, UsageError
from stepscope.records.quality import encode_json

_ANSWERED = "stepscope.answered"  # a key of click's context: the object stands on stdout
_UNSAFE = re.compile(r"[^\x20-\x7e]")


def write_json(value: Any) -> None:
    """Control characters are escaped, as JSON allows for every character."""
    if context := click.get_current_context(silent=True):
        context.meta[_ANSWERED] = True
    sys.stdout.write(json_text(value) + "\n")


def write_cannot_answer(error: Exception) -> None:
    """Print why there is no answer, unless this command has printed one already."""
    context = click.get_current_context(silent=True)
    if context is None or not context.meta.get(_ANSWERED):
        write_json(cannot_answer(error))


# What to do where an error does not say it.
_NEXT = {
    "wrong-use": "`stepscope help COMMAND` lists what the command takes",
    "unreadable": "check the path, then that the file is whole: `stepscope doctor` checks this "
    "machine",
    "not-captured": "record it: `stepscope run -- COMMAND`; `stepscope help run` lists what it "
    "can record",
    "refused": "`stepscope whatif PATH` without --set predicts the changes that this step takes",
    "defect": "set STEPSCOPE_DEBUG=1 to see where, and please report it",
}


def cannot_answer(error: Exception) -> dict[str, Any]:
    """Return the one form in which stepscope says that it cannot answer, and why."""
    from stepscope.ui.words import one_line

    if isinstance(error, StepscopeError):
        kind, (reason, *more) = error.kind, map(str, error.args or ("",))
    elif isinstance(error, click.ClickException):
        kind, reason, more = UsageError.kind, error.format_message(), []
    else:
        kind, more = StepscopeError.kind, []
        reason = f"a defect in stepscope: {type(error).__name__}: {error}"
    next_ = "; ".join(more) or _NEXT.get(kind, _NEXT["defect"])
    said = {"kind": kind, "reason": one_line(reason), "next": one_line(next_)}
    return {"schema": 1, "cannot_answer": said}


def json_text(value: Any) -> str:
    """Bytes of a name that are not UTF-8 become a question mark."""
    text = encode_json(value).decode()
    return text if text.isprintable() else _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    import json

    char = match[0]
    return char if char.isprintable() else json.dumps(char)[1:-1]


def append_line(journal: Path, record: Any) -> None:
    """The line is on the disk before anything that follows from it happens."""
    from stepscope.trace.files import open_to_append

    descriptor = open_to_append(journal)
    try:
        os.write(descriptor, encode_json(record) + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_journal(journal: Path, most_bytes: int) -> list[bytes]:
    """Its lines; a last one that was cut short is thrown away, in the file too."""
    from stepscope.trace.files import read_whole

    text = read_whole(journal, most_bytes)
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        os.truncate(journal, len(whole))
    return whole.splitlines()
