"""The batch size of a script that takes it from another file: settings, or a module of its own."""

from __future__ import annotations

import ast
import re
from itertools import islice
from typing import TYPE_CHECKING

from stepscope.errors import StepscopeError
from stepscope.records.line_costs import BatchElsewhere
from stepscope.trace.regular_files import is_folder, list_folder, may_exist, read_whole
from stepscope.ui.editor.batch_place import batch_in_source, is_batch_name, is_not_for_training

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stepscope.records.line_costs import LineCosts

_SETTINGS = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg")
_FOLDERS = ("conf", "config", "configs", "cfg", "settings")
_MOST_FILES = 100
_MOST_BYTES = 1 << 20
# "batch_size": 64, batch_size = 64, train.batch-size: 64
_SETTING = re.compile(r"""([A-Za-z_][\w.-]*)["']?\s*[:=]\s*(\d[\d_]*)(?![\w.])""")
# [validation], "validation": {, validation:
_SECTION = re.compile(r"""^\s*\[*["']?([A-Za-z_][\w.-]*)["']?\s*(?:\]+|[:=]\s*\{?)\s*$""")


def batch_elsewhere(script: Path, text: str, costs: LineCosts) -> BatchElsewhere | None:
    """None if no file that the script may read holds a number that fits the measured batch."""
    measured = costs.batch
    if measured is None:
        return None
    numbers = [
        number
        for file in islice(dict.fromkeys(_files(script, text)), _MOST_FILES)
        for number in _numbers(file, costs)
    ]
    equal = [number for number in numbers if number.value == measured]
    divides = [one for one in numbers if one.value > 1 and measured % one.value == 0]
    return next(iter([*equal, *divides]), None)


def _files(script: Path, text: str) -> Iterator[Path]:
    """Files that the script names, its modules, then settings beside it: the likeliest first."""
    home = script.parent
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        nodes = []
    for name in _named_files(nodes):
        yield from filter(may_exist, (home / name, home.parent / name))
    for module in _modules(nodes):
        package = home.joinpath(*module.split("."))
        yield from filter(may_exist, (package.with_suffix(".py"), package / "__init__.py"))
    for folder in (home, *(home / name for name in _FOLDERS)):
        if is_folder(folder):
            yield from sorted(file for file in list_folder(folder) if file.suffix in _SETTINGS)


def _named_files(nodes: list[ast.AST]) -> Iterator[str]:
    """Strings that end as a file of settings does."""
    texts = (node.value for node in nodes if isinstance(node, ast.Constant))
    for text in texts:
        if isinstance(text, str) and text.endswith(_SETTINGS) and "\n" not in text:
            yield text


def _modules(nodes: list[ast.AST]) -> Iterator[str]:
    """Every module that is imported; `from config import train` may name one, too."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = f"{node.module}." if node.module else ""
            if node.module:
                yield node.module
            yield from (f"{package}{alias.name}" for alias in node.names if alias.name != "*")


def _numbers(file: Path, costs: LineCosts) -> Iterator[BatchElsewhere]:
    try:
        text = read_whole(file, _MOST_BYTES).decode(errors="replace")
    except StepscopeError:
        return
    if file.suffix == ".py":
        place = batch_in_source(text, costs)
        if place is not None:
            yield BatchElsewhere(
                file=str(file), line=place.line, name=place.spelling, value=place.value
            )
        return
    yield from _settings(file, text)


def _settings(file: Path, text: str) -> Iterator[BatchElsewhere]:
    section = ""
    for line, words in enumerate(text.split("\n"), 1):
        if words.lstrip().startswith(("#", ";", "//")):
            continue
        if heading := _SECTION.match(words):
            section = heading[1]
        for setting in _SETTING.finditer(words):
            if is_batch_name(setting[1].replace(".", "_")) and not is_not_for_training(section):
                value = int(setting[2])
                yield BatchElsewhere(file=str(file), line=line, name=setting[1], value=value)
