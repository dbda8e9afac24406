"""stepscope record: show past predictions beside their results."""

from __future__ import annotations

import click

from stepscope.errors import UsageError
from stepscope.ui.cli.options import VerbCommand, VerbGroup, flag, json_option, top_option


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
@flag(
    "--every-host", "Show the predictions of all hosts that share the folder, not only of this one."
)
@top_option(10, "How many predictions to list.", most=None)
@click.pass_context
def command(ctx: click.Context, as_json: bool, every_host: bool, top: int) -> None:
    """Show past predictions of this host beside their results.

    `whatif --remember` saves a prediction. `compare` and `ab` measure its result. Nothing leaves
    this machine.
    """
    if ctx.invoked_subcommand is not None:
        return
    from stepscope.verify import track_record

    promises = track_record.history(every_host=every_host)
    rows = track_record.summarise(promises)
    ignored = track_record.ignored_deliveries(every_host=every_host)
    folder, unread = track_record.record_folder(), track_record.count_unread()
    if as_json:
        from stepscope.ui.json_text import write_json
        from stepscope.ui.topics.comparison import record_json

        write_json(record_json(promises, rows, folder, unread, ignored))
        return
    from stepscope.ui.terminal.comparison import print_record

    print_record(promises, rows, folder, top=top, unread=unread, ignored=ignored)


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
@flag("--delivery", "Forget only the result: the prediction is open again.", "delivery_only")
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
