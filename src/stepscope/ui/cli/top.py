"""stepscope top: show a run live in this terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins
from msgspec.structs import replace

from stepscope.ui.cli.options import complete_file, flag, json_option, time_between, verb

if TYPE_CHECKING:
    from stepscope.records.run import LiveRank, LiveRun


@verb(
    "top",
    examples=(
        ("stepscope top", "Show the newest run below stepscope-runs"),
        ("stepscope top stepscope-runs/my-run --once", "Print one screen and exit"),
    ),
)
@click.argument("run", required=False, shell_complete=complete_file)
@json_option
@flag("--once", "Print one screen and exit.")
@click.option(
    "--interval",
    type=time_between(0.1, 3600),
    default="1s",
    show_default=True,
    help="Time between two looks at the run folder.",
)
def command(run: str | None, as_json: bool, once: bool, interval: float) -> None:
    """Show a run live in this terminal while it trains: steps, stalls, ranks, memory.

    RUN is the folder that `stepscope run` writes (default: the newest below stepscope-runs). The
    job is not touched, only its folder is read. q quits, p pauses. Without a terminal, and for a
    run that has ended, one screen is printed.
    """
    from stepscope.trace.run_folder.follow_run import RunFollower, choose_run

    follower = RunFollower(choose_run(run))
    if as_json:
        from stepscope.ui.json_text import write_json
        from stepscope.ui.terminal.live import look

        write_json(live_json(look(follower)))
        return
    from stepscope.ui.terminal.live import print_once, show_live

    if once:
        print_once(follower)
    else:
        show_live(follower, interval)


# What `top --json` prints. docs/reference/json.md describes every name.

SCHEMA = 1


def live_json(run: LiveRun) -> dict[str, Any]:
    bare = to_builtins(replace(run, ranks=(), earlier=()))
    return {
        "schema": SCHEMA,
        **bare,
        "spread": run.spread,
        "ranks": [_rank(rank) for rank in run.ranks],
        "earlier": [_rank(rank) for rank in run.earlier],
    }


def _rank(rank: LiveRank) -> dict[str, Any]:
    """Return the figures of the run so far by the names of `explain --json`, without every step."""
    run = to_builtins(replace(rank.run, series=None))
    del run["series"]
    own = to_builtins(replace(rank, run=replace(rank.run, series=None)))
    del own["run"], own["explained_steps"]  # all steps: this is the first look
    return {**run, **own}
