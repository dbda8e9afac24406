"""Return the verbs as data, with what their help shows, for the pages that are made from it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from inspect import cleandoc

import click

from stepscope.ui.cli.options import (
    HELP_NAMES,
    VerbCommand,
    VerbGroup,
    option_table,
    verb_page,
)
from stepscope.ui.front_page import ALSO, GROUPS, NEWER, VERBS


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionEntry:
    """One option: `-o, --out FOLDER`, and its help with the default."""

    spelling: str
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSection:
    """Options under one title."""

    title: str
    options: tuple[OptionEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbEntry:
    """One verb, or one subcommand of it (`name` is then 'library show')."""

    name: str
    group: str  # Look, Change, Watch, More, Also, or Older names
    line: str  # as `stepscope --help` lists it; empty for a subcommand
    usage: str
    summary: str  # one sentence
    description: str  # further paragraphs, with blank lines between them
    examples: tuple[tuple[str, str], ...]  # a command line, and what it does
    sections: tuple[OptionSection, ...]
    newer: str  # the form that replaces it, or empty
    includes: tuple[
        tuple[str, str], ...
    ]  # a flag or a first word, and the verb that reads the rest
    subcommands: tuple[VerbEntry, ...]
    url: str


def catalogue() -> tuple[VerbEntry, ...]:
    """Return all verbs in the order of `stepscope --help`. This imports each of them."""
    order = [*(verb for verbs in GROUPS.values() for verb in verbs), *ALSO, *NEWER]
    assert sorted(order) == sorted(VERBS)
    return tuple(_entry(verb, _command(verb), verb) for verb in order)


def _command(verb: str) -> VerbCommand:
    command: VerbCommand = import_module(f"stepscope.ui.cli.{verb}").command
    return command


def _entry(name: str, command: VerbCommand, verb: str) -> VerbEntry:
    summary, _, description = cleandoc(command.help or "").partition("\n\n")
    subcommands: tuple[VerbEntry, ...] = ()
    if isinstance(command, VerbGroup):
        subcommands = tuple(
            _entry(f"{name} {word}", subcommand, verb)
            for word, subcommand in command.commands.items()
            if isinstance(subcommand, VerbCommand)
        )
    sections = tuple(
        OptionSection(title=title, options=tuple(OptionEntry(spelling=s, help=h) for s, h in rows))
        for title, rows in option_table(command)
    )
    # Click remembers a command's help option from the first context that asks.
    names = list(HELP_NAMES)
    context = click.Context(command, info_name=f"stepscope {name}", help_option_names=names)
    return VerbEntry(
        name=name,
        group=_group(verb),
        line=VERBS.get(name, ""),
        usage=command.get_usage(context).removeprefix("Usage: "),
        summary=" ".join(summary.split()),
        description=description,
        examples=command.examples,
        sections=sections,
        newer=command.newer,
        includes=tuple(command.modes.items()),
        subcommands=subcommands,
        url=verb_page(verb),
    )


def _group(verb: str) -> str:
    for title, verbs in GROUPS.items():
        if verb in verbs:
            return title
    return "Also" if verb in ALSO else "Older names"
