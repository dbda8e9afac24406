"""stepscope why: what a finding means, how to be sure of it, and what to do."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import UsageError
from stepscope.ui.cli.options import json_option
from stepscope.ui.cli.verb_command import VerbCommand, listed

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from stepscope.predict.declaration import WhatIf
    from stepscope.ui.finding_pages import FindingPage

_SCHEMA = 1


def _complete(_ctx: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from stepscope.ui.finding_pages import finding_ids

    return [CompletionItem(name) for name in finding_ids() if name.startswith(incomplete)]


@click.command(
    cls=VerbCommand,
    name="why",
    examples=(
        ("stepscope why host-bound", "What the finding means and what to do about it"),
        ("stepscope why", "All findings, one line each"),
    ),
)
@click.argument("finding", nargs=-1, metavar="[FINDING]", shell_complete=_complete)
@json_option
def command(finding: tuple[str, ...], as_json: bool) -> None:
    """Show what a finding means, an example of it, and what to do about it.

    FINDING is an id that `explain` prints, such as data-loading. The name of a change works too.
    """
    if not finding:
        _print_index(as_json)
        return
    name = "-".join(finding).lower()
    from stepscope.ui.finding_pages import finding_ids, read_page

    if name in finding_ids():
        _print_page(read_page(name), as_json)
    elif not _print_change(name, as_json):
        raise UsageError(_why_unknown(finding))


def _why_unknown(words: tuple[str, ...]) -> str:
    from stepscope.ui.finding_pages import near_findings

    near = near_findings(words)
    hint = f"Did you mean {listed(near)}?" if near else "`stepscope why` lists all findings."
    return f"there is no finding {' '.join(words)!r}. {hint}"


def _print_page(page: FindingPage, as_json: bool) -> None:
    if as_json:
        from stepscope.ui.json_text import write_json

        write_json({"schema": _SCHEMA, **asdict(page)})
        return
    text = f"{page.text.rstrip()}\n\n{page.url}"
    if not sys.stdout.isatty():
        click.echo(text)
        return
    from rich.markdown import Markdown

    from stepscope.ui.terminal.console import make_console

    make_console().print(Markdown(text))


def _print_change(name: str, as_json: bool) -> bool:
    """Print what a change is, and the commands for it; False if there is no such change."""
    from stepscope.fix.remedies import FIXES
    from stepscope.predict.whatifs import WHATIFS, settings_for_remedy
    from stepscope.records.addresses import SITE
    from stepscope.records.remedies import REMEDIES
    from stepscope.records.same_change import FIX_OF

    fix = FIX_OF.get(name, name)
    change, kind = fix.partition("=")[0], name.partition("=")[0]
    known = next((REMEDIES[one] for one in (name, fix, change) if one in REMEDIES), None)
    if known is None and kind not in WHATIFS:
        return False
    lines = [f"{name}: {known.action if known is not None else WHATIFS[kind].help}"]
    settings = [str(setting) for setting in settings_for_remedy(known.id if known else change)]
    if kind in WHATIFS and (kind != name or not settings):
        settings = [name if kind != name else _example(WHATIFS[kind])]
    lines += [f"Predict it: stepscope whatif RUN --set {setting}" for setting in settings[:1]]
    if change in FIXES:
        lines.append(f"Measure it: stepscope tune --only {fix} -- python train.py")
    url = f"{SITE}/reference/changes/"
    if as_json:
        from stepscope.ui.json_text import write_json

        text = "\n".join(lines)
        write_json({"schema": _SCHEMA, "id": name, "title": name, "text": text, "url": url})
        return True
    click.echo("\n".join([*lines, url]))
    return True


def _example(whatif: WhatIf) -> str:
    """Return the setting to type for a what-if that was named without a value."""
    if not whatif.takes_value or whatif.value_is_optional:
        return whatif.name
    return f"{whatif.name}={next(iter(whatif.usual), 'VALUE')}"


def _print_index(as_json: bool) -> None:
    from itertools import groupby

    from stepscope.ui.finding_pages import list_findings

    rows = list_findings()
    if as_json:
        from stepscope.ui.json_text import write_json

        write_json({"schema": _SCHEMA, "findings": [asdict(row) for row in rows]})
        return
    width = max((len(row.id) for row in rows), default=0)
    for group, members in groupby(rows, key=lambda row: row.group):
        click.echo(f"{group or 'Findings'}:")
        for row in members:
            click.echo(f"  {row.id:<{width}}  {row.summary}".rstrip())
        click.echo()
    click.echo("`stepscope why FINDING` explains one of them.")
