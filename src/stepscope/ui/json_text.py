"""JSON of ours is UTF-8, though names of files need not be."""

from __future__ import annotations

import json
from typing import Any

import msgspec


def utf8(body: dict[str, Any]) -> dict[str, Any]:
    """The same, with a question mark for every byte of a name that is no text."""
    try:
        msgspec.json.encode(body)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(body), ensure_ascii=False)
        found: dict[str, Any] = msgspec.json.decode(text.encode("utf-8", "replace"))
        return found
    return body
