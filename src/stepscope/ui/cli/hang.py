"""stepscope hang: who keeps a job from its next step, and where in the script."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.ui.cli.options import complete_file, json_option, verb

if TYPE_CHECKING:
    from stepscope.records.hang import HangAnswer


@verb(
    "hang",
    examples=(
        ("stepscope hang", "Say who hangs in the newest run below stepscope-runs"),
        ("stepscope hang stepscope-runs/my-run --json", "The same for programs"),
    ),
)
@click.argument("run", required=False, shell_complete=complete_file)
@json_option
def command(run: str | None, as_json: bool) -> None:
    """Say which rank keeps a job from its next step, at which line, and who waits for it.

    RUN is the folder that `stepscope run` writes (default: the newest below stepscope-runs). Every
    rank records its stacks and collectives there when no step ends for far longer than a step
    takes, at least 30 s (`run --hang-after`). Nothing is asked of the job, which may still run.
    """
    from stepscope.trace.run_folder.follow_run import choose_run
    from stepscope.ui.api import hang

    folder: Path = choose_run(run, "hang")
    answer = hang(folder)
    if as_json:
        from stepscope.ui.json_text import write_json

        write_json(hang_json(answer))
    else:
        from stepscope.ui.terminal.hang import print_hang

        print_hang(answer, folder)


# What `hang --json` prints. docs/reference/json.md describes every name.

SCHEMA = 1


def hang_json(answer: HangAnswer) -> dict[str, Any]:
    import msgspec

    return {"schema": SCHEMA, **msgspec.to_builtins(answer)}
