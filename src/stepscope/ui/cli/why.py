"""stepscope why: what a finding means, how to be sure of it, and what to do."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from posixpath import normpath
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import UsageError
from stepscope.text.words import SITE, finding_page
from stepscope.ui.cli.options import json_option, listed, names_starting, verb

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


# The pages about findings, as the package carries them: docs/findings, one page per finding.
#
# Links in a page lead to the site, because the other pages are not part of the package.

_INDEX = "README"
_MOST_NEAR = 3
_ROW = re.compile(r"^[-*|] *\[[^\]]*\]\(([a-z0-9-]+)\.md\)[ :|]*(.*)")  # of a list or a table
_HEADING = re.compile(r"^##+ (.+)")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"(?ms)^(```).*?^\1$")


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingPage:
    """One page, with links that lead to the site."""

    id: str
    title: str
    text: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFinding:
    """One row of the index: a finding in one sentence."""

    id: str
    group: str
    summary: str


@functools.cache
def _folder() -> str:
    """Return the pages' folder, beside this file: in a checkout they are still in docs."""
    folders = ("pages/findings", "../../../docs/findings")
    return next((one for one in folders if (Path(__file__).parents[1] / one).is_dir()), "")


def finding_ids() -> tuple[str, ...]:
    """Return the ids of all findings that have a page."""
    if not _folder():
        return ()
    pages = (Path(__file__).parents[1] / _folder()).glob("*.md")
    return tuple(sorted(page.stem for page in pages if page.stem != _INDEX))


def read_page(finding: str) -> FindingPage:
    """Return the page about one of `finding_ids()`; in its code, links stay as they are."""

    def on_site(link: re.Match[str]) -> str:
        target, mark, anchor = link[2].partition("#")
        if ":" in target:
            return link[0]
        path = normpath(f"findings/{target or finding}")
        path = path.removesuffix("README.md").removesuffix(".md").strip("/")
        home = f"{SITE}/{path}/" if path and path != "." else f"{SITE}/"
        return f"[{link[1]}]({home}{mark}{anchor})"

    page = _raw(finding)
    title = page.partition("\n")[0].lstrip("# ").strip()
    parts, start = [], 0
    for code in _FENCED.finditer(page):
        parts += [_LINK.sub(on_site, page[start : code.start()]), code[0]]
        start = code.end()
    text = "".join([*parts, _LINK.sub(on_site, page[start:])])
    return FindingPage(id=finding, title=title, text=text, url=finding_page(finding))


def list_findings() -> list[ListedFinding]:
    """Return every finding in one sentence, in the order of the index."""
    group, rows = "", {}
    for line in _raw(_INDEX).splitlines():
        if heading := _HEADING.match(line):
            group = heading[1].strip()
        elif (row := _ROW.match(line)) and row[1] not in rows:
            summary = _LINK.sub(r"\1", row[2].partition("|")[0].strip())
            summary = summary.replace("`", "").replace("**", "")
            rows[row[1]] = ListedFinding(id=row[1], group=group, summary=summary)
    ids = [name for name in finding_ids() if name not in rows]
    return [*rows.values(), *(ListedFinding(id=name, group="", summary="") for name in ids)]


def near_findings(words: Sequence[str]) -> list[str]:
    """Return findings that these words may mean: by id, by title or by what the page says first."""
    ids = finding_ids()
    asked = "-".join(words).lower().strip(".:-")
    begins = [name for name in ids if name.startswith(asked)]
    spelled = [*begins, *get_close_matches(asked, ids, _MOST_NEAR, 0.8)]
    if spelled:
        return list(dict.fromkeys(spelled))[:_MOST_NEAR]
    parts = {part for word in words for part in re.split(r"\W+", word.lower()) if len(part) > 2}
    rows = {row.id: row.summary for row in list_findings()}
    hits = {}
    for name in ids:
        fence = _FENCED.search(_raw(name))
        message = fence[0].splitlines()[1] if fence else ""
        text = f"{name} {rows.get(name, '')} {message}".lower()
        hits[name] = len(parts & set(re.split(r"\W+", text)))
    most = max(hits.values(), default=0)
    return [name for name in ids if most and hits[name] == most][:_MOST_NEAR]


@functools.cache
def _raw(name: str) -> str:
    if not _folder():
        return ""
    return (Path(__file__).parents[1] / _folder() / f"{name}.md").read_text("utf-8")


_SCHEMA = 1


def _complete(_ctx: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
    return names_starting(finding_ids(), incomplete)


@verb(
    "why",
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
    if name in finding_ids():
        _print_page(read_page(name), as_json)
    elif not _print_change(name, as_json):
        near = near_findings(finding)
        hint = f"Did you mean {listed(near)}?" if near else "`stepscope why` lists all findings."
        raise UsageError(f"there is no finding {' '.join(finding)!r}. {hint}")


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
    from stepscope.changes import APPLIED, APPLIED_AS, CHANGES, PREDICTED
    from stepscope.predict.whatifs import settings_for_remedy

    fix = APPLIED_AS.get(name, name)
    change, kind = fix.partition("=")[0], name.partition("=")[0]
    offered = [CHANGES[id_] for id_ in (name, fix, change) if id_ in CHANGES]
    known = next((one for one in offered if one.action), None)
    if known is None and kind not in PREDICTED:
        return False
    lines = [f"{name}: {known.action if known is not None else PREDICTED[kind].help}"]
    settings = [str(setting) for setting in settings_for_remedy(known.id if known else change)]
    if kind in PREDICTED and (kind != name or not settings):
        whatif = PREDICTED[kind]
        needs_value = kind == name and whatif.takes_value and not whatif.value_is_optional
        settings = [f"{name}={next(iter(whatif.usual), 'VALUE')}" if needs_value else name]
    lines += [f"Predict it: stepscope whatif RUN --set {setting}" for setting in settings[:1]]
    if change in APPLIED:
        lines.append(f"Measure it: stepscope tune --only {fix} -- python train.py")
    url = f"{SITE}/reference/changes/"
    if as_json:
        from stepscope.ui.json_text import write_json

        text = "\n".join(lines)
        write_json({"schema": _SCHEMA, "id": name, "title": name, "text": text, "url": url})
        return True
    click.echo("\n".join([*lines, url]))
    return True


def _print_index(as_json: bool) -> None:
    from itertools import groupby

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
