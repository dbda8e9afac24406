"""A verb whose help teaches: a summary, examples, options in groups, a link to its page.

What the help shows is data on the command (`examples`, `option_groups`, `modes`, `newer`), so that
the documentation is generated from it too.
"""

from __future__ import annotations

import os
import textwrap
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from stepscope.records.addresses import SITE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Examples = Sequence[tuple[str, str]]  # a command line, and what it does
    OptionGroups = Sequence[tuple[str, Sequence[str]]]  # a title, and long names of options

WIDEST_HELP = 100
HELP_NAMES = ("-h", "--help")
_MOST_HINTS = 3
_WIDEST_NAME = 26
_NEAR = 0.65
# What people type who come from other tools, if the verb has no such option of its own.
_MEANT = {"output": "out", "dir": "out", "verbose": "full", "silent": "quiet", "dry-run": "list"}


class VerbCommand(click.Command):
    """A command with examples, option groups and hints.

    `modes` names verbs that this one includes. With a flag such as --gpus, or a first word such
    as `show`, the other verb reads the remaining words.
    """

    def __init__(
        self,
        *args: Any,
        examples: Examples = (),
        option_groups: OptionGroups = (),
        modes: Mapping[str, str] | None = None,
        newer: str = "",
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.examples = tuple(examples)
        self.option_groups = tuple((title, tuple(names)) for title, names in option_groups)
        self.modes = dict(modes or {})
        self.newer = newer

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        place = self._place_of_mode(args)
        if place is None:
            return super().make_context(info_name, args, parent, **extra)
        mode = args[place]
        other: click.Command = import_module(f"stepscope.ui.cli.{self.modes[mode]}").command
        if mode.startswith("-"):
            info_name = f"{info_name} {mode}"
            args = [*args[:place], *args[place + 1 :]]
        return other.make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run this verb, or the one that `make_context` chose."""
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(self._no_such_option(error.option_name), ctx) from None
        except click.MissingParameter as error:
            if not self.examples or ctx.resilient_parsing:
                raise
            said = error.format_message()
            raise click.UsageError(f"{said} Example: {self.examples[0][0]}", ctx) from None

    def _place_of_mode(self, args: Sequence[str]) -> int | None:
        """Return where the command line names a mode, before the words of a command start."""
        if args and args[0] in self.modes and not os.path.exists(args[0]):  # noqa: PTH110
            return 0
        mixes_words = self.context_settings.get("allow_interspersed_args", True)
        taking_value = {
            name
            for option in options_of(self)
            if not option.is_flag and not option.count
            for name in option.opts
        }
        skip = False
        for place, word in enumerate(args):
            if skip:
                skip = False
            elif word == "--" or (not word.startswith("-") and not mixes_words):
                return None
            elif word.startswith("--") and word in self.modes:
                return place
            else:
                skip = word in taking_value
        return None

    def _no_such_option(self, name: str) -> str:
        """Return what is wrong, and options of this verb that are spelled alike."""
        known = {n: n.lstrip("-") for option in options_of(self) for n in long_names(option)}
        known["--help"] = "help"
        asked = name.lstrip("-").lower()
        near = [flag for flag, text in known.items() if len(asked) > 1 and text.startswith(asked)]
        if not near:
            words = get_close_matches(asked, known.values(), _MOST_HINTS, _NEAR)
            near = [flag for word in words for flag, text in known.items() if text == word]
        if not near and f"--{_MEANT.get(asked)}" in known:
            near = [f"--{_MEANT[asked]}"]
        hint = f" Did you mean {' or '.join(near[:_MOST_HINTS])}?" if near else ""
        from stepscope.ui.words import one_line

        return f"No such option {one_line(name)}.{hint}"

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        if self.newer and ctx.info_name == self.name:
            formatter.write(f"\n  New form: {self.newer}\n")
        if self.examples:
            with formatter.section("Examples"):
                for number, (line, comment) in enumerate(self.examples):
                    formatter.write(("\n" if number else "") + f"  # {comment}\n  {line}\n")
        self.format_options(ctx, formatter)
        formatter.write(f"\nMore: {verb_page(_verb_in(ctx))}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        tables = option_table(self, ctx)
        names = [name for _, rows in tables for name, _ in rows]
        first = max((len(name) for name in names if len(name) <= _WIDEST_NAME), default=0)
        for title, rows in tables:
            with formatter.section(title):
                for name, text in rows:
                    _write_row(formatter, name, text, first)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)


class VerbGroup(VerbCommand, click.Group):
    """A verb with subcommands."""

    command_class = VerbCommand


def verb_page(verb: str) -> str:
    """Return the address of a verb's page."""
    return f"{SITE}/reference/cli/{verb}/"


def options_of(command: click.Command) -> list[click.Option]:
    """Return the options to show, without --help."""
    return [p for p in command.params if isinstance(p, click.Option) and not p.hidden]


def long_names(option: click.Option) -> list[str]:
    """Return the name with two dashes, and the one that switches it off. Further names are old."""
    shown = [name for name in option.opts if name.startswith("--")][:1]
    return [*shown, *option.secondary_opts]


def long_name(parameter: click.Parameter) -> str:
    """Return the name that a message about an option uses."""
    return next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0])


def spelling(option: click.Option) -> str:
    """Return an option as help shows it: `-o, --out FOLDER`."""
    short = [name for name in option.opts if not name.startswith("--")]
    names = ", ".join([*short, " / ".join(long_names(option))])
    value = "" if option.is_flag or option.count else value_name(option)
    return f"{names} {value}".rstrip()


def value_name(option: click.Option) -> str:
    """Return what stands for an option's value."""
    kind = option.type
    if option.metavar:
        return option.metavar
    if isinstance(kind, click.Choice):
        return "|".join(map(str, kind.choices))
    if isinstance(kind, click.Path):
        return "PATH"
    return "N" if kind.name.startswith(("integer", "float")) else kind.name.upper()


def explanation(option: click.Option) -> str:
    """Return an option's help, with its default."""
    default = option.default
    if not option.show_default or default is None or option.is_flag:
        return option.help or ""
    return f"{option.help} [default: {default}]"


def option_table(
    command: VerbCommand, ctx: click.Context | None = None
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return titles with rows of options, in the order of the help."""
    waiting = {long_name(option): option for option in options_of(command)}
    tables: list[tuple[str, list[tuple[str, str]]]] = []
    for title, names in command.option_groups:
        tables.append((title, [_row(waiting.pop(name)) for name in names]))
    rest = [_row(option) for option in waiting.values()]
    if ctx is not None and (help_option := command.get_help_option(ctx)) is not None:
        rest.append((", ".join(help_option.opts), "Show this help."))
    if tables and len(rest) == 1:
        tables[-1][1].extend(rest)
    elif rest:
        tables.append(("Other options" if tables else "Options", rest))
    return tables


def _write_row(formatter: click.HelpFormatter, name: str, text: str, first: int) -> None:
    """Write an option and its help, which starts in the same column in every section."""
    margin = " " * formatter.current_indent
    width = formatter.width - len(margin) - first - 2
    lines = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
    if len(name) > first:
        formatter.write(f"{margin}{name}\n")
        name = ""
    for line in lines:
        formatter.write(f"{margin}{name:<{first}}  {line}\n")
        name = ""


def _row(option: click.Option) -> tuple[str, str]:
    return spelling(option), explanation(option)


def _verb_in(ctx: click.Context) -> str:
    """Return the verb that the command line reached, for a subcommand the verb it belongs to."""
    while ctx.parent is not None and ctx.parent.parent is not None:
        ctx = ctx.parent
    return ctx.command.name or ""


def listed(names: Iterable[str]) -> str:
    """Return names for a sentence: `a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
