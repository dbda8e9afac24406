"""Templates, scripts and style sheets of the pages: those of `serve`, else the report's."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from stepscope.ui.html.bundle import read_page_file
from stepscope.ui.html.render import make_environment

_ROOMS = ("stepscope.ui.serve", "stepscope.ui.html")
_TYPES = {"js": "text/javascript", "css": "text/css"}


def render(template: str, **context: Any) -> str:
    """A whole page, or a part of one."""
    text: str = _environment().get_template(template).render(**context)
    return text


@cache
def page_file(name: str) -> tuple[str, str] | None:
    """Text and media type of a script or style sheet; None for any other name."""
    if name not in _names():
        return None
    return _read(name), _TYPES[name.rpartition(".")[2]]


@cache
def _names() -> frozenset[str]:
    """Only what lies in the two folders: a name from an address never becomes a path."""
    folders = [files(room).joinpath("page") for room in _ROOMS]
    names = (entry.name for folder in folders for entry in folder.iterdir())
    return frozenset(name for name in names if name.endswith((".js", ".css")))


def has_page_file(name: str) -> bool:
    return name in _names()


def _read(name: str) -> str:
    try:
        return files("stepscope.ui.serve").joinpath("page", name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return read_page_file(name)


@cache
def _environment() -> Any:
    return make_environment(_read)
