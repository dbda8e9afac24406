"""`--json`: one object on stdout, valid whatever the names in it hold, harmless in a terminal."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from stepscope.records.encode_json import encode_json

_OBEYED = re.compile(r"[^\x20-\x7e]")


def write_json(value: Any) -> None:
    """What a terminal would obey is escaped, as JSON allows for every character."""
    sys.stdout.write(json_text(value) + "\n")


def json_text(value: Any) -> str:
    """Names that are no UTF-8, such as a file's may be, have a mark in place of odd bytes."""
    text = encode_json(value).decode()
    return text if text.isprintable() else _OBEYED.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    char = found[0]
    return char if char.isprintable() else json.dumps(char)[1:-1]
