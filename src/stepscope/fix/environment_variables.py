"""Remedies that are one environment variable, set where the command is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def add_setting(text: str, name: str, value: str) -> str:
    """`name:value` among comma-separated settings, in place of one of that name."""
    settings = [part.strip() for part in text.split(",") if part.strip()]
    others = [part for part in settings if part.partition(":")[0].strip() != name]
    return ",".join([*others, f"{name}:{value}"])


def add_path(text: str, path: str) -> str:
    """`path` first in a list of libraries to load, once."""
    others = [part for part in text.replace(":", " ").split() if part != path]
    return ":".join([path, *others])


def first_set(variables: Mapping[str, str], *names: str) -> str | None:
    return next((name for name in names if variables.get(name)), None)
