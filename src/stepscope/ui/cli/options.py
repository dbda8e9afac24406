"""Declare a verb whose help teaches, and the options that several verbs share, with the
checks that go with them.
"""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import UsageError
from stepscope.measure.settings import STEP_ON
from stepscope.text.words import SITE

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from stepscope.ui.loggers.run_log import LogChoice

    Option = Callable[[Callable[..., Any]], Callable[..., Any]]
    Examples = Sequence[tuple[str, str]]
    OptionGroups = Sequence[tuple[str, Sequence[str]]]

# A verb whose help teaches: a summary, examples, options in groups, a link to its page.
#
# What the help shows is data on the command (`examples`, `option_groups`, `modes`, `newer`), so
# that the documentation is generated from it too.

WIDEST_HELP = 100
HELP_NAMES = ("-h", "--help")
_MOST_HINTS = 3
_WIDEST_NAME = 26
_NEAR = 0.65
# What people type who come from other tools, if the verb has no such option of its own.
_MEANT = {"output": "out", "dir": "out", "verbose": "full", "silent": "quiet", "dry-run": "list"}
_ELSEWHERE = {"collect": " `stepscope gather` joins the folders of all hosts after the run."}


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
        hint = hint or _ELSEWHERE.get(asked, "")
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


# Lists of changes: those that stepscope applies, for `tune --list` and `run --with list`.


def print_applied_changes(*, as_json: bool) -> None:
    """Print each change with its values and what it does to the numbers."""
    from stepscope.changes import APPLIED, CHANGES
    from stepscope.ui.tune.plan import EFFECT_WORDS

    if as_json:
        from stepscope.ui.json_text import write_json

        listed = [
            {
                "id": name,
                "what": CHANGES[name].action,
                "effect": str(fix.effect),
                "values": [value for value in fix.values if value],
            }
            for name, fix in APPLIED.items()
        ]
        write_json({"schema": 1, "changes": listed})
        return
    width = max(map(len, APPLIED))
    for name, fix in APPLIED.items():
        click.echo(f"{name:<{width}}  {CHANGES[name].action}")
        values = ", ".join(f"{name}={value}" for value in fix.values if value)
        more = [f"it {EFFECT_WORDS[fix.effect]}", *([f"values: {values}"] if values else [])]
        click.echo(f"{'':<{width}}  {'; '.join(more)}")


# Sizes as people type them: 8GB, 24GiB.

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 1 << 10 * power for power, unit in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?)?B?", re.IGNORECASE)


def parse_size(text: str, option: str) -> int:
    """8GB, 24GiB, a number of bytes. Raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    size = round(float(match[1]) * _UNITS[(match[2] or "").capitalize()]) if match else 0
    if size <= 0:
        raise UsageError(f"{option} {text!r}: write 8GB, 24GiB or a number of bytes")
    return size


_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(ms|[smh]?)(?:in)?")


def parse_time(text: str, option: str, least: float = 0.0, most: float = float("inf")) -> float:
    """Return seconds for 10m, 90s, 1.5h, 500ms or a number of seconds. Raise UsageError."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option} {text!r}: write 10m, 90s or 1h")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds <= 0 and not least:
        raise UsageError(f"{option} {text!r}: write 10m, 90s or 1h")
    if not least <= seconds <= most:
        limit = f"{least:g} s or more" if most == float("inf") else f"{least:g} to {most:g} s"
        raise UsageError(f"{option} {text!r} is not in the range: {limit}")
    return seconds


class _Time(click.ParamType):  # type: ignore[type-arg]
    """A duration."""

    name = "time"

    def __init__(self, least: float = 0.0, most: float = float("inf")) -> None:
        self._least, self._most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> float:
        del ctx
        if isinstance(value, (int, float)):
            return float(value)
        return parse_time(value, _named(param), self._least, self._most)


class _Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> int:
        del ctx
        return value if isinstance(value, int) else parse_size(value, _named(param))


def _named(param: click.Parameter | None) -> str:
    return long_name(param) if param is not None else "time"


TIME, SIZE = _Time(), _Size()
time_between = _Time

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."
)
step_on_option = click.option(
    "--step-on",
    type=click.Choice(STEP_ON),
    default="auto",
    show_default=True,
    metavar="EVENT",
    help=f"What marks the end of a training step: {listed(STEP_ON)}.",
)


def _remedies(ctx: click.Context, _parameter: Any, text: str) -> tuple[str, ...]:
    """Raise UsageError for a change that stepscope does not know; `list` prints all of them."""
    if not text or ctx.resilient_parsing:
        return ()
    if text == "list":
        print_applied_changes(as_json=False)
        ctx.exit()
    from stepscope.fix.named_changes import choose_all

    return tuple(map(str, choose_all(text.split(","))))


def complete_change(_ctx: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
    """Complete the last of several changes that commas separate."""
    from click.shell_completion import CompletionItem

    from stepscope.changes import APPLIED

    before, comma, last = incomplete.rpartition(",")
    return [CompletionItem(f"{before}{comma}{name}") for name in APPLIED if name.startswith(last)]


with_option = click.option(
    "--with",
    "remedies",
    default="",
    metavar="CHANGE[,CHANGE]",
    callback=_remedies,
    shell_complete=complete_change,
    help="Apply these changes inside the training. The script stays untouched. `--with list` "
    "lists them.",
)


def _loggers(_context: Any, _parameter: Any, texts: tuple[str, ...]) -> tuple[LogChoice, ...]:
    """Raise UsageError for an unknown logger."""
    if not texts:
        return ()
    from stepscope.ui.loggers.run_log import LogChoice

    return tuple(map(LogChoice.parse, texts))


log_option = click.option(
    "--log",
    "logs",
    multiple=True,
    metavar="KIND[:WHERE]",
    callback=_loggers,
    help="Log steps, verdict and budget while the command runs. KIND is tensorboard[:DIR], "
    "mlflow[:EXPERIMENT] or wandb[:PROJECT]. Repeatable.",
)
no_cache_option = click.option(
    "--no-cache",
    is_flag=True,
    help="Read the trace files themselves, use no cached copy and write none.",
)


def top_option(default: int, most: int | None, help_text: str) -> Option:
    rows = click.IntRange(1, most)
    return click.option(
        "--top", default=default, show_default=True, type=rows, metavar="N", help=help_text
    )


def out_option(help_text: str, **settings: Any) -> Option:
    folder = click.Path(path_type=Path, file_okay=False)
    return click.option(
        "-o", "--out", metavar="FOLDER", help=help_text, **{"type": folder, **settings}
    )


def wait_option(default: int, help_text: str) -> Option:
    return click.option(
        "--wait",
        default=default,
        show_default=True,
        type=click.IntRange(1),
        metavar="N",
        help=help_text,
    )


def html_option(help_text: str) -> Option:
    return click.option(
        "--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=help_text
    )


def complete_file(ctx: click.Context, _param: Any, incomplete: str) -> list[CompletionItem]:
    """Complete files, and the words that choose another verb."""
    from click.shell_completion import CompletionItem

    words = getattr(ctx.command, "modes", {})
    chosen = [CompletionItem(word) for word in words if incomplete and word.startswith(incomplete)]
    return [*chosen, CompletionItem(incomplete, type="file")]


def mode_option(flag: str, help_text: str) -> Option:
    """Return a flag that hands the other words to another verb; VerbCommand acts on it."""
    return click.option(flag, is_flag=True, expose_value=False, help=help_text)


def check_html(html: Path | None) -> None:
    """Raise UsageError before anything is measured."""
    _check_folder("--html", html)


def check_perfetto(perfetto: Path | None) -> None:
    """Raise UsageError before anything is read."""
    _check_folder("--perfetto", perfetto)


def _check_folder(option: str, file: Path | None) -> None:
    if file and not file.absolute().parent.is_dir():
        raise UsageError(f"{option} {file}: its folder does not exist")


@contextlib.contextmanager
def writing_html(html: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"--html {html} could not be written: {error.strerror}") from None
