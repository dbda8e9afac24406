"""stepscope record: show past predictions beside their results."""

from __future__ import annotations

import click

from stepscope.errors import UsageError
from stepscope.ui.cli.options import VerbCommand, VerbGroup, json_option, top_option


@click.group(
    cls=VerbGroup,
    name="record",
    invoke_without_command=True,
    newer="stepscope whatif --history",
    examples=(
        ("stepscope whatif --history", "Show the latest predictions beside their results"),
        ("stepscope whatif --history forget 3f2a91c0", "Stop counting one prediction"),
    ),
)
@json_option
@click.option(
    "--every-host",
    is_flag=True,
    help="Show the predictions of all hosts that share the folder, not only of this one.",
)
@top_option(10, None, "How many predictions to list.")
@click.pass_context
def command(ctx: click.Context, as_json: bool, every_host: bool, top: int) -> None:
    """Show past predictions of this host beside their results.

    `whatif --remember` saves a prediction. `compare` and `ab` measure its result. Nothing leaves
    this machine.
    """
    if ctx.invoked_subcommand is not None:
        return
    from stepscope.verify.track_record import (
        count_unread,
        history,
        ignored_deliveries,
        record_folder,
        summarise,
    )

    kept = history(every_host=every_host)
    rows = summarise(kept)
    ignored = ignored_deliveries(every_host=every_host)
    if as_json:
        from stepscope.ui.json_text import write_json
        from stepscope.ui.topics.comparison import record_json

        write_json(record_json(kept, rows, record_folder(), count_unread(), ignored))
        return
    from stepscope.ui.terminal.comparison import print_record

    print_record(kept, rows, record_folder(), top=top, unread=count_unread(), ignored=ignored)


@command.command(
    name="forget",
    short_help="stop counting a prediction",
    cls=VerbCommand,
    examples=(
        ("stepscope whatif --history forget 3f2a91c0", "Stop counting one prediction"),
        (
            "stepscope whatif --history forget --all-of precision",
            "Stop counting all predictions of a change",
        ),
    ),
)
@click.argument("ids", nargs=-1, metavar="ID...")
@click.option("--all-of", metavar="CHANGE", help="All predictions of a change, such as precision.")
@click.option(
    "--delivery",
    "delivery_only",
    is_flag=True,
    help="Forget only the result: the prediction is open again.",
)
def forget_command(ids: tuple[str, ...], all_of: str | None, delivery_only: bool) -> None:
    """Stop counting predictions: later ones no longer learn from their results.

    This appends a line to the track record. Nothing is overwritten.
    """
    if bool(ids) == bool(all_of):
        raise UsageError("name the ids of predictions to forget, or --all-of CHANGE")
    from stepscope.ui.topics.comparison import forgotten_words
    from stepscope.ui.words import one_line
    from stepscope.verify.track_record import find_promise, forget, forget_all_of

    if all_of:
        forgotten = forget_all_of(all_of, delivery_only=delivery_only)
    else:
        known = dict.fromkeys(find_promise(promise_id).id for promise_id in ids)
        forgotten = tuple(forget(promise_id, delivery_only=delivery_only) for promise_id in known)
    for promise in forgotten:
        click.echo(one_line(forgotten_words(promise, delivery_only=delivery_only)))
