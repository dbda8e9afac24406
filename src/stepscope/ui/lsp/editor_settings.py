"""What a user may set in the editor, section `stepscope`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EditorSettings:
    """Names in the editor: python, arguments, profileOnSave, limitSeconds, hints, estimate."""

    python: str = sys.executable  # that runs the scripts
    arguments: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by glob of the script
    profile_on_save: bool = False
    limit_s: float = LIMIT_S  # after which a profile is ended
    hints: bool = True
    estimate: bool = True  # after an edit, of scripts that were measured once

    def updated(self, values: Any) -> tuple[EditorSettings, tuple[str, ...]]:
        """With the editor's values, and what is wrong with those that are left out."""
        if not isinstance(values, dict):
            return self, ()
        section = values.get("stepscope")
        given = section if isinstance(section, dict) else values
        settings, wrong = self, []
        for name, (attribute, read, expected) in _FIELDS.items():
            value = given.get(name)
            if value is None or value == "":
                continue
            try:
                settings = replace(settings, **{attribute: read(value)})
            except (TypeError, ValueError):
                wrong.append(f"stepscope.{name} is {value!r}: expected {expected}")
        return settings, tuple(wrong)

    def arguments_of(self, script: Path, roots: Iterable[Path]) -> tuple[str, ...]:
        """Of the first glob that matches its name or its path, from a workspace's root or whole."""
        names = [script.name, script.as_posix()]
        inside = [root for root in roots if script.is_relative_to(root)]
        names += [script.relative_to(root).as_posix() for root in inside]
        for pattern, arguments in self.arguments.items():
            if any(fnmatch(name, pattern) for name in names):
                return arguments
        return ()


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return str(Path(value).expanduser()) if value.startswith("~") else value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 86_400:
        raise ValueError
    return float(value)


def _arguments(value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict):
        raise TypeError
    for words in value.values():
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise TypeError
    return {str(pattern): tuple(words) for pattern, words in value.items()}


_FIELDS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "python": ("python", _text, "the path of a Python"),
    "arguments": ("arguments", _arguments, 'lists by script, such as {"train.py": ["--lr", "1"]}'),
    "profileOnSave": ("profile_on_save", _bool, "true or false"),
    "limitSeconds": ("limit_s", _seconds, "seconds, from 1 to 86400"),
    "hints": ("hints", _bool, "true or false"),
    "estimate": ("estimate", _bool, "true or false"),
}
