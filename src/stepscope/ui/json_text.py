"""`--json`: one object on stdout, valid JSON and safe in a terminal whatever names it holds."""

from __future__ import annotations

import re
import sys
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
