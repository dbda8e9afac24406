"""stepscope record: what was promised and what was delivered."""

from __future__ import annotations

import sys

import click


@click.command(name="record", short_help="what was promised and what was delivered")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option(
    "--every-host",
    is_flag=True,
    help="Show promises of all hosts that share the folder, not of this one alone.",
)
@click.option(
    "--top",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="How many promises to list.",
)
def command(as_json: bool, every_host: bool, top: int) -> None:
    """The track record of this host: each what-if's promises, and what comparisons measured.

    `whatif` writes promises down, `compare` and `ab` answer them. Nothing leaves this machine.
    """
    from stepscope.verify.record_file import count_unread, record_folder
    from stepscope.verify.track_record import history, summarise

    kept = history(every_host=every_host)
    rows = summarise(kept)
    if as_json:
        import msgspec

        from stepscope.ui.record import record_json

        body = record_json(kept, rows, record_folder(), count_unread())
        sys.stdout.write(msgspec.json.encode(body).decode() + "\n")
        return
    from stepscope.ui.terminal.record import print_record

    print_record(kept, rows, record_folder(), top=top, unread=count_unread())
