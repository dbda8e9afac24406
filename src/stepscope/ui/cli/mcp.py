"""stepscope mcp: answer the questions of agents and other programs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click

from stepscope.errors import UsageError
from stepscope.ui.cli.options import flag, verb
from stepscope.ui.user_input import writing

_NAME = "stepscope/SKILL.md"


@verb(
    "mcp",
    examples=(
        ("stepscope mcp", "What a client starts: a server on standard input and output"),
        ("stepscope mcp /data/runs --allow-commands", "Read this folder, run training commands"),
        ("stepscope mcp --skill ~/.agents/skills", "Write the skill file that teaches an agent"),
    ),
)
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path))
@flag("--allow-commands", "Let clients run training commands: the tools `run` and `tune`.")
@flag(
    "--text", "Answer with JSON as text, for clients that show a model nothing else.", "text_only"
)
@click.option(
    "--skill",
    type=click.Path(path_type=Path),
    is_flag=False,
    flag_value=Path("-"),
    metavar="[FOLDER]",
    help="Print the skill file for agents, or write it into a folder of skills.",
)
def command(
    folders: tuple[Path, ...], allow_commands: bool, text_only: bool, skill: Path | None
) -> None:
    """Answer the questions of agents and other programs, by the Model Context Protocol.

    Clients start this server themselves. It reads only below FOLDERS (default: the current one).
    An answer has at most 2,000 tokens and leads to its next page.
    """
    if skill is not None:
        _give_skill(skill)
        return
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder")
    try:
        server = import_module("stepscope.ui.mcp.server")  # by name, as verbs are loaded
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "stepscope":
            raise
        raise UsageError(
            f"`stepscope mcp` needs {error.name}: pip install 'stepscope[mcp]'"
        ) from None
    roots = folders or (Path(),)
    server.serve(roots, allow_commands=allow_commands, text_only=text_only)


def _give_skill(folder: Path) -> None:
    text = (Path(__file__).parents[1] / "mcp/skill.md").read_text("utf-8")
    if folder == Path("-"):
        click.echo(text, nl=False)
        return
    target = folder / _NAME
    with writing(target, "--skill"):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
    click.echo(f"written: {target}", err=True)
