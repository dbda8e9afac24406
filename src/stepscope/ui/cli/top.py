"""stepscope top: show a run live in this terminal."""

from __future__ import annotations

import click

from stepscope.ui.cli.options import complete_file, json_option, time_between
from stepscope.ui.cli.verb_command import VerbCommand


@click.command(
    cls=VerbCommand,
    name="top",
    examples=(
        ("stepscope top", "Show the newest run below stepscope-runs"),
        ("stepscope top stepscope-runs/my-run --once", "Print one screen and exit"),
    ),
)
@click.argument("run", required=False, shell_complete=complete_file)
@json_option
@click.option("--once", is_flag=True, help="Print one screen and exit.")
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
    from stepscope.trace.follow_run import RunFollower, choose_run

    follower = RunFollower(choose_run(run))
    if as_json:
        from stepscope.ui.json_text import write_json
        from stepscope.ui.live_json import live_json
        from stepscope.ui.live_screen import look

        write_json(live_json(look(follower)))
        return
    from stepscope.ui.live_screen import print_once, show_live

    if once:
        print_once(follower)
    else:
        show_live(follower, interval)
