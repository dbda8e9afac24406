"""stepscope record: what was promised and what was measured afterwards."""

from __future__ import annotations

import click

from stepscope.errors import UsageError
from stepscope.ui.cli.options import json_option, top_option


@click.group(name="record", invoke_without_command=True)
@json_option
@click.option(
    "--every-host",
    is_flag=True,
    help="Show the promises of all hosts that share the folder, not only of this one.",
)
@top_option(10, None, "How many promises to list.")
@click.pass_context
def command(ctx: click.Context, as_json: bool, every_host: bool, top: int) -> None:
    """The track record of this host: what each what-if promised, and what comparisons measured.

    `whatif --remember` records a promise, `compare` and `ab` answer it. Nothing leaves this
    machine.
    """
    if ctx.invoked_subcommand is not None:
        return
    from stepscope.verify.record_file import count_unread, record_folder
    from stepscope.verify.track_record import history, ignored_deliveries, summarise

    kept = history(every_host=every_host)
    rows = summarise(kept)
    ignored = ignored_deliveries(every_host=every_host)
    if as_json:
        from stepscope.ui.json_text import write_json
        from stepscope.ui.record import record_json

        write_json(record_json(kept, rows, record_folder(), count_unread(), ignored))
        return
    from stepscope.ui.terminal.record import print_record

    print_record(kept, rows, record_folder(), top=top, unread=count_unread(), ignored=ignored)


@command.command(name="forget", short_help="stop counting a promise")
@click.argument("ids", nargs=-1, metavar="ID...")
@click.option("--all-of", metavar="NAME", help="All promises of a what-if, such as precision.")
@click.option(
    "--delivery",
    "delivery_only",
    is_flag=True,
    help="Forget only its measurement: the promise is open again.",
)
def forget_command(ids: tuple[str, ...], all_of: str | None, delivery_only: bool) -> None:
    """Stop counting promises: predictions no longer learn from them.

    This appends a line to the record; nothing is overwritten.
    """
    if bool(ids) == bool(all_of):
        raise UsageError("record forget takes ids of promises, or --all-of NAME")
    from stepscope.ui.record import forgotten_words
    from stepscope.ui.words import one_line
    from stepscope.verify.track_record import find_promise, forget, forget_all_of

    if all_of:
        forgotten = forget_all_of(all_of, delivery_only=delivery_only)
    else:
        known = dict.fromkeys(find_promise(promise_id).id for promise_id in ids)
        forgotten = tuple(forget(promise_id, delivery_only=delivery_only) for promise_id in known)
    for promise in forgotten:
        click.echo(one_line(forgotten_words(promise, delivery_only=delivery_only)))
