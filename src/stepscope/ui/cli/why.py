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
from stepscope.ui.cli.options import VerbCommand, json_option, listed

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
    for folder in ("pages/findings", "../../../docs/findings"):
        if (Path(__file__).parents[1] / folder).is_dir():
            return folder
    return ""


def finding_ids() -> tuple[str, ...]:
    """Return the ids of all findings that have a page."""
    if not _folder():
        return ()
    pages = (Path(__file__).parents[1] / _folder()).glob("*.md")
    return tuple(sorted(page.stem for page in pages if page.stem != _INDEX))


def read_page(finding: str) -> FindingPage:
    """Return the page about one of `finding_ids()`."""
    raw = _raw(finding)
    title = raw.partition("\n")[0].lstrip("# ").strip()
    text = _with_absolute_links(raw, finding)
    return FindingPage(id=finding, title=title, text=text, url=finding_page(finding))


def list_findings() -> list[ListedFinding]:
    """Return every finding in one sentence, in the order of the index."""
    group, rows = "", {}
    for line in _raw(_INDEX).splitlines():
        if heading := _HEADING.match(line):
            group = heading[1].strip()
        elif (row := _ROW.match(line)) and row[1] not in rows:
            summary = _plain(row[2].partition("|")[0].strip())
            rows[row[1]] = ListedFinding(id=row[1], group=group, summary=summary)
    ids = [name for name in finding_ids() if name not in rows]
    return [*rows.values(), *(ListedFinding(id=name, group="", summary="") for name in ids)]


def near_findings(words: Sequence[str]) -> list[str]:
    """Return findings that these words may mean: by id, by title or by what the page says first."""
    ids = finding_ids()
    asked = "-".join(words).lower().strip(".:-")
    parts = {part for word in words for part in re.split(r"\W+", word.lower()) if len(part) > 2}
    said = {name: _said(name) for name in ids}
    hits = {name: len(parts & text) for name, text in said.items() if parts & text}
    most = max(hits.values(), default=0)
    by_words = [name for name in ids if most and hits.get(name) == most]
    begins = [name for name in ids if name.startswith(asked)]
    spelled = [*begins, *get_close_matches(asked, ids, _MOST_NEAR, 0.8)]
    return list(dict.fromkeys(spelled or by_words))[:_MOST_NEAR]


def _said(finding: str) -> set[str]:
    """Return the words of a finding's id, of its row in the index and of its message's title."""
    row = {row.id: row.summary for row in _rows()}.get(finding, "")
    fence = _FENCED.search(_raw(finding))
    message = fence[0].splitlines()[1] if fence else ""
    return {word for word in re.split(r"\W+", f"{finding} {row} {message}".lower()) if word}


@functools.cache
def _rows() -> tuple[ListedFinding, ...]:
    return tuple(list_findings())


@functools.cache
def _raw(name: str) -> str:
    if not _folder():
        return ""
    return (Path(__file__).parents[1] / _folder() / f"{name}.md").read_text("utf-8")


def _plain(markdown: str) -> str:
    return _LINK.sub(r"\1", markdown).replace("`", "").replace("**", "")


def _with_absolute_links(page: str, finding: str) -> str:
    """Return a page whose relative links are addresses on the site; code stays as it is."""

    def address(link: re.Match[str]) -> str:
        target, mark, anchor = link[2].partition("#")
        if ":" in target:
            return link[0]
        path = normpath(f"findings/{target or finding}")
        path = path.removesuffix("README.md").removesuffix(".md").strip("/")
        home = f"{SITE}/{path}/" if path and path != "." else f"{SITE}/"
        return f"[{link[1]}]({home}{mark}{anchor})"

    parts, start = [], 0
    for code in _FENCED.finditer(page):
        parts += [_LINK.sub(address, page[start : code.start()]), code[0]]
        start = code.end()
    return "".join([*parts, _LINK.sub(address, page[start:])])


_SCHEMA = 1


def _complete(_ctx: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

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

    if name in finding_ids():
        _print_page(read_page(name), as_json)
    elif not _print_change(name, as_json):
        raise UsageError(_why_unknown(finding))


def _why_unknown(words: tuple[str, ...]) -> str:

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
        settings = [name if kind != name else _example(kind)]
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


def _example(name: str) -> str:
    """Return the setting to type for a what-if that was named without a value."""
    from stepscope.changes import PREDICTED

    prediction = PREDICTED[name]
    if not prediction.takes_value or prediction.value_is_optional:
        return name
    return f"{name}={next(iter(prediction.usual), 'VALUE')}"


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
