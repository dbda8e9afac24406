"""Write usage, examples and options of a verb, for its page in docs/reference/cli."""

from __future__ import annotations

import re
from functools import cache
from html import escape
from typing import TYPE_CHECKING

from catalogue import OptionSection, VerbEntry, catalogue
from page_text import code, table

if TYPE_CHECKING:
    from collections.abc import Iterator

_OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
_PLACEHOLDER = re.compile(r"[\w/-]*(?:<\w+>[\w/-]*)+")  # stepscope-runs/<time>-<script>


def verb_tables(verb: str) -> str:
    """Return how to call a verb, examples, and a table for each group of its options."""
    entry = _entries()[verb]
    parts = [_fence("text", entry.usage)]
    if entry.examples:
        parts.append(_fence("sh", "\n".join(_examples(entry))))
    if entry.sections:
        parts.append("## Options")
    parts += [_section(section) for section in entry.sections]
    parts += _includes(entry)
    for subcommand in entry.subcommands:
        parts += [f"## {subcommand.name}", subcommand.summary, _fence("text", subcommand.usage)]
        parts += [_section(section) for section in subcommand.sections]
    return "\n\n".join(parts)


def verb_index(group: str) -> str:
    """Return one line for each verb of a group, such as `Look` or `Older names`."""
    entries = [entry for entry in _entries().values() if entry.group == group]
    if group == "Older names":
        rows = [(_link(entry.name), code(entry.newer)) for entry in entries]
        return table(("older name", "new form"), rows)
    rows = [(_link(entry.name), entry.line) for entry in entries]
    return table(("verb", "what it does"), rows)


@cache
def _entries() -> dict[str, VerbEntry]:
    return {entry.name: entry for entry in catalogue()}


def _link(verb: str) -> str:
    return f"[{code(verb)}]({verb}.md)"


def _fence(language: str, text: str) -> str:
    """Return a block of code; usage does not wrap with the width of a terminal."""
    if language == "text":
        text = " ".join(text.split())
    return f"```{language}\n{text}\n```"


def _examples(entry: VerbEntry) -> Iterator[str]:
    for line, comment in entry.examples:
        yield f"# {comment}"
        yield line


def _section(section: OptionSection) -> str:
    rows = [(_option(option.spelling), _in_code(option.help)) for option in section.options]
    options = table(("option", "what"), rows)
    return options if section.title == "Options" else f"### {section.title}\n\n{options}"


def _in_code(text: str) -> str:
    """Set options and placeholders in code, as names in backticks already are."""
    parts = text.split("`")
    for number in range(0, len(parts), 2):
        plain = _PLACEHOLDER.sub(lambda found: code(found[0]), parts[number])
        parts[number] = _OPTION.sub(lambda found: code(found[0]), plain)
    return "`".join(parts)


def _option(spelling: str) -> str:
    """Return a spelling in code. Readers of markdown differ on a bar inside a table's code."""
    if "|" not in spelling:
        return code(spelling)
    return f"<code>{escape(spelling).replace('|', '&#124;')}</code>"


def _includes(entry: VerbEntry) -> Iterator[str]:
    """Yield where the options of verbs that this one includes are listed."""
    for verb in dict.fromkeys(other for _, other in entry.includes):
        words = " or ".join(code(word) for word, other in entry.includes if other == verb)
        yield f"With {words}, the options are those of {_link(verb)}."
