"""JSON that stepscope writes: `--json`, one object on stdout that is safe in a terminal whatever
names it holds; and journals, one line each for what is done.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from stepscope.records.quality import encode_json

_UNSAFE = re.compile(r"[^\x20-\x7e]")


def write_json(value: Any) -> None:
    """Control characters are escaped, as JSON allows for every character."""
    sys.stdout.write(json_text(value) + "\n")


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
