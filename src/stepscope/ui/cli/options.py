"""Declare verbs whose help teaches, and the options that several of them share.

What the help shows is data on the command, so that the documentation is generated from it too.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.records.folders import STEP_ON
from stepscope.text.words import SITE
from stepscope.ui.user_input import parse_share, parse_size, parse_time, require_folder

if TYPE_CHECKING:
    Option = Callable[[Callable[..., Any]], Callable[..., Any]]
    Examples = Sequence[tuple[str, str]]  # a command line, and what it does
    from click.shell_completion import CompletionItem

    from stepscope.ui.loggers.run_log import LogChoice

COMPLETE = "_STEPSCOPE_COMPLETE"  # the variable that a shell asks with
HELP_NAMES = ("-h", "--help")
_MOST_HINTS = 3
_WIDEST_NAME = 26
_NEAR = 0.65
# What people type who come from other tools, if the verb has no such option of its own.
_MEANT = {"output": "out", "dir": "out", "verbose": "full", "silent": "quiet", "dry-run": "list"}
_ELSEWHERE = {"collect": " `stepscope gather` joins the folders of all hosts after the run."}


class VerbCommand(click.Command):
    """A command with examples, option groups and hints.

    `groups` names options by title: {"Output": "--json --html"}. `modes` names verbs that this one
    includes: with a flag such as --gpus, or a first word such as `show`, the other verb reads the
    remaining words.
    """

    def __init__(
        self,
        *args: Any,
        examples: Examples = (),
        groups: Mapping[str, str] | None = None,
        modes: Mapping[str, str] | None = None,
        newer: str = "",
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.examples = tuple(examples)
        self.groups = {title: tuple(names.split()) for title, names in (groups or {}).items()}
        self.modes = dict(modes or {})
        self.newer = newer

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        at = self._find_mode(args)
        if at is None:
            asked = any(word == "--json" for _, word in self._own_options(args))
            with _cannot_answer_as_json(lambda: asked and "--json" in self._valued()):
                return super().make_context(info_name, args, parent, **extra)
        mode = args[at]
        other: click.Command = import_module(f"stepscope.ui.cli.{self.modes[mode]}").command
        if mode.startswith("-"):
            info_name = f"{info_name} {mode}"
            args = [*args[:at], *args[at + 1 :]]
        return other.make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run this verb, or the one that `make_context` chose."""
        if ctx.command is not self:
            return ctx.command.invoke(ctx)
        with _cannot_answer_as_json(lambda: ctx.params.get("as_json", False)):
            return super().invoke(ctx)

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

    def _find_mode(self, args: Sequence[str]) -> int | None:
        """Return where the command line names a mode, before the words of a command start."""
        if args and args[0] in self.modes and not os.path.exists(args[0]):  # noqa: PTH110
            return 0
        flags = {mode for mode in self.modes if mode.startswith("--")}
        return next((at for at, word in self._own_options(args) if word in flags), None)

    def _own_options(self, args: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Yield the words that can be options of this verb, before those of a command start."""
        mixes_words = self.context_settings.get("allow_interspersed_args", True)
        takes_value = self._valued()
        skip = False
        for number, word in enumerate(args):
            if skip:
                skip = False
                continue
            if word == "--" or (not word.startswith("-") and not mixes_words):
                return
            yield number, word
            skip = takes_value.get(word, False)

    def _valued(self) -> dict[str, bool]:
        """Return every name of an option, and whether a value follows it."""
        return {
            name: not (option.is_flag or option.count)
            for option in options_of(self)
            for name in option.opts
        }

    def _no_such_option(self, name: str) -> str:
        """Return what is wrong, and options of this verb that are spelled alike."""
        known = {n: n.lstrip("-") for option in options_of(self) for n in long_names(option)}
        known["--help"] = "help"
        asked = name.lstrip("-").lower()
        near = [flag for flag, text in known.items() if len(asked) > 1 and text.startswith(asked)]
        if not near:
            from difflib import get_close_matches

            words = get_close_matches(asked, known.values(), _MOST_HINTS, _NEAR)
            near = [flag for word in words for flag, text in known.items() if text == word]
        if not near and f"--{_MEANT.get(asked)}" in known:
            near = [f"--{_MEANT[asked]}"]
        hint = f" Did you mean {' or '.join(near[:_MOST_HINTS])}?" if near else ""
        from stepscope.ui.words import one_line

        return f"No such option {one_line(name)}.{hint or _ELSEWHERE.get(asked, '')}"

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        if self.newer and ctx.info_name == self.name:
            formatter.write(f"\n  New form: {self.newer}\n")
        if self.examples:
            lines = [f"  # {comment}\n  {line}\n" for line, comment in self.examples]
            with formatter.section("Examples"):
                formatter.write("\n".join(lines))
        self.format_options(ctx, formatter)
        while ctx.parent is not None and ctx.parent.parent is not None:
            ctx = ctx.parent  # a subcommand's page is that of its verb
        formatter.write(f"\nMore: {verb_page(ctx.command.name or '')}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write tables whose second column starts at the same place in every section."""
        tables = option_table(self, ctx)
        names = [name for _, rows in tables for name, _ in rows]
        first = max((len(name) for name in names if len(name) <= _WIDEST_NAME), default=0)
        for title, rows in tables:
            with formatter.section(title):
                margin = " " * formatter.current_indent
                width = formatter.width - len(margin) - first - 2
                for name, text in rows:
                    if len(name) > first:
                        formatter.write(f"{margin}{name}\n")
                        name = ""
                    for line in textwrap.wrap(
                        text, width, break_on_hyphens=False, break_long_words=False
                    ):
                        formatter.write(f"{margin}{name:<{first}}  {line}\n")
                        name = ""
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)


class VerbGroup(VerbCommand, click.Group):
    """A verb with subcommands."""

    command_class = VerbCommand


@contextmanager
def _cannot_answer_as_json(wanted: Callable[[], bool]) -> Iterator[None]:
    """With --json, stdout says why there is no answer; the error goes on to `main`."""
    try:
        yield
    except (click.Abort, click.exceptions.Exit, BrokenPipeError):
        raise
    except Exception as error:
        if wanted():
            from stepscope.ui.json_text import write_cannot_answer

            write_cannot_answer(error)
        raise


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


def option_table(
    command: VerbCommand, ctx: click.Context | None = None
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return titles with rows of options, in the order of the help."""
    waiting = {long_names(option)[0]: _row(option) for option in options_of(command)}
    tables = [
        (title, [waiting.pop(name) for name in names]) for title, names in command.groups.items()
    ]
    rest = list(waiting.values())
    if ctx is not None and (help_option := command.get_help_option(ctx)) is not None:
        rest.append((", ".join(help_option.opts), "Show this help."))
    if tables and len(rest) == 1:
        tables[-1][1].extend(rest)
    elif rest:
        tables.append(("Other options" if tables else "Options", rest))
    return tables


def _row(option: click.Option) -> tuple[str, str]:
    """Return an option as help shows it, `-o, --out FOLDER`, and its help with the default."""
    short = [name for name in option.opts if not name.startswith("--")]
    names = ", ".join([*short, " / ".join(long_names(option))])
    value = "" if option.is_flag or option.count else _value_name(option)
    text = option.help or ""
    if option.show_default and option.default is not None and not option.is_flag:
        text = f"{text} [default: {option.default}]"
    return f"{names} {value}".rstrip(), text


def _value_name(option: click.Option) -> str:
    kind = option.type
    if option.metavar:
        return option.metavar
    if isinstance(kind, click.Choice):
        return "|".join(map(str, kind.choices))
    if isinstance(kind, click.Path):
        return "PATH"
    return "N" if kind.name.startswith(("integer", "float")) else kind.name.upper()


# Options that several verbs share.


def verb(
    name: str,
    *,
    examples: Examples,
    groups: Mapping[str, str] | None = None,
    takes_command: bool = False,
    cls: type[VerbCommand] = VerbCommand,
    **more: Any,
) -> Callable[[Callable[..., Any]], VerbCommand]:
    """Declare a verb. With `takes_command`, the options end where the user's command begins."""
    settings = {"allow_interspersed_args": False} if takes_command else {}
    return click.command(
        name, cls=cls, examples=examples, groups=groups, context_settings=settings, **more
    )


def listed(names: Iterable[str]) -> str:
    """Return names for a sentence: `a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def print_applied_changes(*, as_json: bool) -> None:
    """Print each change that stepscope applies, with its values and what it does to the numbers."""
    from stepscope.changes import APPLIED, CHANGES
    from stepscope.ui.tune.plan import EFFECT_WORDS

    if as_json:
        from stepscope.ui.json_text import write_json

        changes = [
            {
                "id": name,
                "what": CHANGES[name].action,
                "effect": str(fix.effect),
                "values": [value for value in fix.values if value],
            }
            for name, fix in APPLIED.items()
        ]
        write_json({"schema": 1, "changes": changes})
        return
    width = max(map(len, APPLIED))
    for name, fix in APPLIED.items():
        click.echo(f"{name:<{width}}  {CHANGES[name].action}")
        values = ", ".join(f"{name}={value}" for value in fix.values if value)
        more = [f"it {EFFECT_WORDS[fix.effect]}", *([f"values: {values}"] if values else [])]
        click.echo(f"{'':<{width}}  {'; '.join(more)}")


# Kinds of options.


class _Time(click.ParamType):  # type: ignore[type-arg]
    """A duration."""

    name = "time"

    def __init__(
        self, least: float = 0.0, most: float = float("inf"), *, never: bool = False
    ) -> None:
        """`never`: 0 is allowed and stands for never."""
        self._least, self._most, self._never = least, most, never

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> float:
        del ctx
        if isinstance(value, (int, float)):
            return float(value)
        if self._never and value.strip("0.") in ("", "s"):
            return 0.0
        return parse_time(value, long_name(param), self._least, self._most)


class _Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> int:
        del ctx
        return value if isinstance(value, int) else parse_size(value, long_name(param))


TIME, TIME_OR_NEVER, SIZE = _Time(), _Time(never=True), _Size()
time_between = _Time


def long_name(parameter: click.Parameter | None) -> str:
    """Return the name that a message about an option uses."""
    names = parameter.opts if parameter is not None else ["time"]
    return next((name for name in names if name.startswith("--")), names[0])


def read_share(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Read 3% or 0.03."""
    del ctx
    share = None if value is None else parse_share(value)
    if value is not None and (share is None or share >= 1):
        raise click.BadParameter(f"{value!r}: write 3% or 0.03", param=param)
    return share


def flag(name: str, help_text: str, variable: str | None = None, **more: Any) -> Option:
    names = (name, variable) if variable else (name,)
    return click.option(*names, is_flag=True, help=help_text, **more)


def count_option(
    name: str, help_text: str, *, default: int | None = None, least: int = 1, **more: Any
) -> Option:
    """Return an option that takes a whole number."""
    kind = click.IntRange(least, more.pop("most", None))
    return click.option(
        name, default=default, show_default=default is not None, type=kind, help=help_text, **more
    )


def file_option(name: str, help_text: str, metavar: str = "FILE") -> Option:
    """Return an option that names a file to write; its folder has to exist."""

    def check(_context: Any, parameter: click.Parameter, path: Path | None) -> Path | None:
        require_folder(path, long_name(parameter))
        return path

    kind = click.Path(path_type=Path, dir_okay=False)
    return click.option(name, type=kind, metavar=metavar, help=help_text, callback=check)


def folder_option(name: str, help_text: str) -> Option:
    kind = click.Path(path_type=Path, file_okay=False)
    return click.option(name, type=kind, metavar="FOLDER", help=help_text)


def mode_option(name: str, help_text: str) -> Option:
    """Return a flag that hands the other words to another verb; VerbCommand acts on it."""
    return flag(name, help_text, expose_value=False)


def names_starting(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def complete_change(_ctx: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
    """Complete the last of several changes that commas separate."""
    from stepscope.changes import APPLIED

    before, comma, _ = incomplete.rpartition(",")
    return names_starting((f"{before}{comma}{name}" for name in APPLIED), incomplete)


def complete_file(ctx: click.Context, _param: Any, incomplete: str) -> list[CompletionItem]:
    """Complete files, and the words that choose another verb."""
    from click.shell_completion import CompletionItem

    words = getattr(ctx.command, "modes", {}) if incomplete else ()
    return [*names_starting(words, incomplete), CompletionItem(incomplete, type="file")]


# Options and arguments that several verbs share.

json_option = flag("--json", "Print one JSON object.", "as_json")

step_on_option = click.option(
    "--step-on",
    type=click.Choice(STEP_ON),
    default="auto",
    show_default=True,
    metavar="EVENT",
    help=f"What marks the end of a training step: {listed(STEP_ON)}.",
)

no_cache_option = flag("--no-cache", "Read the traces themselves and write no cached copy.")


def _read_changes(ctx: click.Context, _parameter: Any, text: str) -> tuple[str, ...]:
    """Raise UsageError for a change that stepscope does not know; `list` prints all of them."""
    if not text or ctx.resilient_parsing:
        return ()
    if text == "list":
        print_applied_changes(as_json=False)
        ctx.exit()
    from stepscope.fix.named_changes import choose_all

    return tuple(map(str, choose_all(text.split(","))))


with_option = click.option(
    "--with",
    "remedies",
    default="",
    metavar="CHANGE[,CHANGE]",
    callback=_read_changes,
    shell_complete=complete_change,
    help="Apply these changes inside the training. The script stays untouched. `--with list` "
    "lists them.",
)


def _read_loggers(_context: Any, _parameter: Any, texts: tuple[str, ...]) -> tuple[LogChoice, ...]:
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
    callback=_read_loggers,
    help="Log steps, verdict and budget while the command runs. KIND is tensorboard[:DIR], "
    "mlflow[:EXPERIMENT] or wandb[:PROJECT]. Repeatable.",
)


def top_option(default: int, help_text: str, most: int | None = 100) -> Option:
    return count_option("--top", help_text, default=default, most=most, metavar="N")


def out_option(help_text: str, **settings: Any) -> Option:
    settings = {"type": click.Path(path_type=Path, file_okay=False), **settings}
    return click.option("-o", "--out", metavar="FOLDER", help=help_text, **settings)


def wait_option(default: int, help_text: str) -> Option:
    return count_option("--wait", help_text, default=default, metavar="N")


def html_option(help_text: str) -> Option:
    kind = click.Path(path_type=Path, dir_okay=False)
    return click.option("--html", type=kind, metavar="FILE", help=help_text)


def command_argument(*, required: bool = True, **more: Any) -> Option:
    """Return the argument that takes the user's command, word by word."""
    more = {"shell_complete": complete_file, **more}
    name = more.pop("name", "command")
    return click.argument(name, nargs=-1, required=required, type=click.UNPROCESSED, **more)


paths_argument = click.argument("paths", nargs=-1, required=True, shell_complete=complete_file)
