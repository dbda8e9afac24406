"""stepscope top: a run while it goes on."""

from __future__ import annotations

import click

from stepscope.ui.cli.options import json_option


@click.command(name="top")
@click.argument("run", required=False)
@json_option
@click.option("--once", is_flag=True, help="Print the run as it is now, once, and exit.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two looks at the run folder.",
)
def command(run: str | None, as_json: bool, once: bool, interval: float) -> None:
    """Show a run live in this terminal, while the job trains: steps, stalls, ranks, memory.

    RUN is the folder that `stepscope run` writes; without it, the newest one under stepscope-runs.
    The job is not touched: only its folder is read. q quits, p pauses. Without a terminal, and for
    a run that has ended, one screen is printed.
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
