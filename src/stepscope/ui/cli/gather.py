"""stepscope gather: the parts of one job, from several hosts, in one run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepscope.records.figures import size
from stepscope.records.words import counted
from stepscope.ui.cli.options import json_option
from stepscope.ui.json_text import write_json

if TYPE_CHECKING:
    from stepscope.ui.gather import Amount, Gathered

_NAMED = 8


@click.command(name="gather")
@click.argument("sources", nargs=-1, required=True)
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="The run folder to make, or to go on with.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Copy everything: also reports, other windows and traces of stalls, which explain does "
    "not read.",
)
@json_option
def command(sources: tuple[str, ...], out: Path, everything: bool, as_json: bool) -> None:
    """Copy the parts of one job from several hosts or buckets into one run folder.

    SOURCES are run folders, folders of run folders or globs: here, ssh://host/folder,
    s3://bucket/folder, or any URL that fsspec reads. A second call copies only what is missing or
    has changed.
    """
    import msgspec

    from stepscope.ui.gather import gather
    from stepscope.ui.terminal.progress import shown_progress

    with shown_progress(quiet=as_json, verb="copying") as progress:
        gathered = gather(sources, out, everything=everything, progress=progress)
    if as_json:
        write_json({"schema": 1, **msgspec.to_builtins(gathered)})
        return
    for line in _lines(gathered):
        click.echo(line)


def _lines(gathered: Gathered) -> list[str]:
    found, world = len(gathered.ranks), gathered.world_size
    of_all = f" of {world}" if world and world != found else ""
    sources = counted(len(gathered.sources), "source")
    left_out = f"; {_amount(gathered.left_out)} left out (--all)" if gathered.left_out.files else ""
    lines = [
        f"gathered  {counted(found, 'rank')}{of_all} from {sources} into {gathered.folder}",
        f"copied    {_amount(gathered.copied)}; {_amount(gathered.kept)} there already{left_out}",
        *(f"note      {note}" for note in gathered.notes[:_NAMED]),
    ]
    if world and world > found:
        missing = [rank for rank in range(world) if rank not in set(gathered.ranks)]
        named = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
        lines.append(f"missing   ranks {named}: gather their host's folder into {gathered.folder}")
    return [*lines, f"next      stepscope explain {gathered.folder}"]


def _amount(amount: Amount) -> str:
    return f"{counted(amount.files, 'file')} ({size(amount.size_bytes)})"
