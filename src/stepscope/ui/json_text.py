"""`--json`: one object on stdout, valid whatever the names in it hold, harmless in a terminal."""

from __future__ import annotations

import re
import sys
from typing import Any

import msgspec

_OBEYED = re.compile(r"[^\x20-\x7e]")


def write_json(value: Any) -> None:
    """What a terminal would obey is escaped, as JSON allows for every character."""
    sys.stdout.write(json_text(value) + "\n")


def json_text(value: Any) -> str:
    """Names that are no UTF-8, such as a file's may be, have a mark in place of odd bytes."""
    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        text = msgspec.json.encode(_readable(msgspec.to_builtins(value))).decode()
    return text if text.isprintable() else _OBEYED.sub(_escaped, text)


def _readable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_readable(key): _readable(inner) for key, inner in value.items()}
    return [_readable(inner) for inner in value] if isinstance(value, list | tuple) else value


def _escaped(found: re.Match[str]) -> str:
    char = found[0]
    import json

    return char if char.isprintable() else json.dumps(char)[1:-1]
