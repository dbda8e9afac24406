"""stepscope gather: copy the parts of one job from several hosts into one run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepscope.records.figures import size
from stepscope.records.words import counted
from stepscope.ui.cli.options import complete_file, json_option, out_option
from stepscope.ui.cli.verb_command import VerbCommand
from stepscope.ui.json_text import write_json

if TYPE_CHECKING:
    from stepscope.ui.gather import Amount, Gathered

_NAMED = 8


@click.command(
    cls=VerbCommand,
    name="gather",
    examples=(
        (
            "stepscope gather ssh://node1/job/run ssh://node2/job/run -o run",
            "Copy the parts of two hosts, then explain the folder",
        ),
        ("stepscope gather s3://bucket/job -o run", "Copy a run from a bucket"),
    ),
)
@click.argument("sources", nargs=-1, required=True, shell_complete=complete_file)
@out_option(
    "The run folder to make or to complete.",
    required=True,
    type=click.Path(path_type=Path),
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Also copy what `explain` does not read: reports, other recordings, traces of stalls.",
)
@json_option
def command(sources: tuple[str, ...], out: Path, everything: bool, as_json: bool) -> None:
    """Copy the parts of one job from several hosts or buckets into one run folder.

    SOURCES are run folders, folders of run folders or globs. They may be here, at
    ssh://host/folder, at s3://bucket/folder, or at any URL that fsspec reads. A second call copies
    only what is missing or has changed.
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
