"""Values as JSON, also with text that UTF-8 cannot hold, such as a file name of odd bytes."""

from __future__ import annotations

from typing import Any

import msgspec


def encode_json(value: Any) -> bytes:
    """Encode a record; every character that UTF-8 cannot hold becomes a question mark."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_replace_all(msgspec.to_builtins(value)))


def replace_invalid(text: str) -> str:
    """The text with a question mark for every character that UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()


def _replace_all(value: Any) -> Any:
    if isinstance(value, str):
        return replace_invalid(value)
    if isinstance(value, dict):
        return {_replace_all(key): _replace_all(inner) for key, inner in value.items()}
    return [_replace_all(inner) for inner in value] if isinstance(value, list | tuple) else value
