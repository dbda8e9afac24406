"""What clients may ask. Tools: what each takes, and the JSON of the command line that answers it.
Resources: findings' pages, and what the JSON fields mean.

The tools' functions run in the worker; the server itself only lists them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from stepscope.errors import UsageError
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from stepscope.ui.cli.whatif import OpenedBench
    from stepscope.ui.mcp.folders import AllowedFolders
    from stepscope.ui.serve.listed_runs import RunSummary, ServedFolder

_LONGEST_PATH = 4096
_MOST_CHANGES = 16
_MOST_WORDS = 256
_MOST_LISTED = 200  # run folders in one list, the newest

_PathText = Annotated[str, Meta(min_length=1, max_length=_LONGEST_PATH)]
RunPath = Annotated[
    _PathText,
    Meta(description="A run folder, a trace, a folder of traces, or the id: of a listed run."),
]
Part = Annotated[
    str,
    Meta(description="Answer with this part only, such as findings or ranks[0].kernels."),
]
Cursor = Annotated[
    str,
    Meta(description="The next page: `cursor` of the last one, with the same other arguments."),
]
Words = Annotated[
    tuple[str, ...],
    Meta(description="The command, word by word.", max_length=_MOST_WORDS),
]
WorkingFolder = Annotated[str, Meta(description="Where it runs (default: the first folder).")]


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every tool takes."""

    part: Part = ""
    cursor: Cursor = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the paths that decide the answer; none where other things do too."""
        return ()


class ExplainQuestion(Question, frozen=True, kw_only=True):
    path: RunPath
    memory_limit: Annotated[
        str, Meta(description="Memory that training may use on each device, such as 24GB.")
    ] = ""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,)


class WhatifQuestion(Question, frozen=True, kw_only=True):
    path: RunPath
    changes: Annotated[
        tuple[str, ...],
        Meta(
            description="Changes made together, such as precision=bf16 or batch=x2. Empty: the "
            "usual ones, each alone.",
            max_length=_MOST_CHANGES,
        ),
    ] = ()


class CompareQuestion(Question, frozen=True, kw_only=True):
    a: RunPath
    b: RunPath

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.a, self.b)


class RunsQuestion(Question, frozen=True, kw_only=True):
    folder: Annotated[str, Meta(description="Only the runs below this folder.")] = ""
    name: Annotated[str, Meta(description="Only runs whose path holds this text.")] = ""


class FindingQuestion(Question, frozen=True, kw_only=True):
    finding: Annotated[
        str, Meta(description="Its id, such as host-bound. Empty: all, a line each.")
    ] = ""


class HangQuestion(Question, frozen=True, kw_only=True):
    path: Annotated[_PathText, Meta(description="The run folder of the job.")]


class TuneQuestion(Question, frozen=True, kw_only=True):
    command: Words = ()
    folder: Annotated[
        str, Meta(description="Instead of a command: show the tune in this folder again.")
    ] = ""
    budget: Annotated[str, Meta(description="Time for all trials, such as 10m.")] = "10m"
    only: Annotated[tuple[str, ...], Meta(description="Try these changes only.")] = ()
    working_folder: WorkingFolder = ""


class RunQuestion(Question, frozen=True, kw_only=True):
    command: Words
    changes: Annotated[tuple[str, ...], Meta(description="Apply these changes.")] = ()
    working_folder: WorkingFolder = ""


class Tool(NamedTuple):
    """One tool. `answer` gives the JSON that its pages are cut from."""

    question: type[Question]
    about: str
    answer: Callable[[Any, AllowedFolders], dict[str, Any]]
    runs_commands: bool = False


def _explain(question: ExplainQuestion, folders: AllowedFolders) -> dict[str, Any]:
    from stepscope.ui.api import explain_paths
    from stepscope.ui.several_jobs import explain_apart, several_json
    from stepscope.ui.terminal.short import grave_notes, list_notes
    from stepscope.ui.topics.explanation_json import explanation_json
    from stepscope.ui.user_input import parse_size

    limit = parse_size(question.memory_limit, "memory_limit") if question.memory_limit else None
    paths = [str(folders.resolve(question.path))]
    try:
        explanation = explain_paths(paths, cache=True, quiet=True, memory_limit=limit)
    except UsageError as error:
        return several_json(explain_apart(error, paths, cache=True))
    answer = explanation_json(explanation)
    if doubts := grave_notes(list_notes(explanation)):
        answer["notes"] = doubts
    # The answer and what to do about it first, then what it rests on.
    first = ("verdict", "why", "next", "also", "notes", "headline", "findings", "advice", "budget")
    return _in_order(answer, (*first, "stragglers", "run", "ranks_without_trace", "quality"))


def _whatif(question: WhatifQuestion, folders: AllowedFolders) -> dict[str, Any]:
    from stepscope.ui.api import parse_settings
    from stepscope.ui.cli.whatif import outcome_json, predict_outcome

    wanted = parse_settings(question.changes)
    path = str(folders.resolve(question.path))
    stamp = folders.stamp([question.path])
    opened = partial(_open, stamp) if stamp else None
    answer = outcome_json(predict_outcome([path], wanted, cache=True, quiet=True, open_with=opened))
    first = ("sentence", "why", "next", "verdict", "settings", "refused", "assumptions", "tried")
    return _in_order(answer, first)


@functools.lru_cache(maxsize=1)  # several changes are tried on one run
def _open(_stamp: str, *paths: str, cache: bool, quiet: bool) -> OpenedBench:
    from stepscope.ui.api import open_bench

    return open_bench(*paths, cache=cache, quiet=quiet)


def _compare(question: CompareQuestion, folders: AllowedFolders) -> dict[str, Any]:
    """As `compare --json`, but no prediction is checked: looking changes nothing."""
    from stepscope.ui.progress import shown_progress
    from stepscope.ui.topics.comparison import comparison_json
    from stepscope.verify.compare import compare

    a, b = (str(folders.resolve(side)) for side in (question.a, question.b))
    with shown_progress(quiet=True) as progress:
        answer = comparison_json(compare([a], [b], progress=progress))
    numbers = ("a_ms", "b_ms", "change", "low", "high", "confidence", "smallest_detectable")
    return _in_order(answer, ("sentence", "why", "next", "verdict", *numbers, "notes", "config"))


def _find_runs(question: RunsQuestion, folders: AllowedFolders) -> dict[str, Any]:
    from stepscope.text.words import counted
    from stepscope.ui.serve.listed_runs import RunsDirectory

    roots = [folders.resolve(question.folder)] if question.folder else folders.roots
    known: dict[str, ServedFolder] = {}
    for root in roots:
        known |= {found.id: found for found in RunsDirectory(root).scan()}
    wanted = [found for found in known.values() if question.name in str(found.path)]
    wanted.sort(key=lambda found: _changed(found.path), reverse=True)
    rows = []
    for found in wanted[:_MOST_LISTED]:
        row = {"path": folders.shown(found.path), "id": f"id:{found.id}", "kind": found.kind}
        summary = None if found.problem else _summary(found)
        told = msgspec.to_builtins(summary) if summary else {"problem": found.problem}
        rows.append(row | {name: value for name, value in told.items() if value not in (None, "")})
    why = f"below {folders.words}"
    if len(wanted) > len(rows):
        why += f"; the newest {len(rows)} are listed: `name` chooses others"
    return {
        "schema": 1,
        "verdict": f"{counted(len(wanted), 'run')} found.",
        "why": why,
        "next": "explain one of them by its path or id"
        if wanted
        else "record one: stepscope run -- python train.py",
        "runs": rows,
    }


@functools.lru_cache(maxsize=_MOST_LISTED)  # its stamp says when it has changed
def _summary(folder: ServedFolder) -> RunSummary:
    from stepscope.ui.serve.listed_runs import summarise

    return summarise(folder.path, folder.kind)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _finding_help(question: FindingQuestion, folders: AllowedFolders) -> dict[str, Any]:
    """As `why --json`, with the text as lines."""
    del folders
    from dataclasses import asdict

    from stepscope.ui.cli.why import finding_ids, list_findings, near_findings, read_page

    if not question.finding:
        rows = [asdict(row) for row in list_findings()]
        return {"schema": 1, "verdict": f"{len(rows)} findings have a page.", "findings": rows}
    name = question.finding.lower()
    if name not in finding_ids():
        near = ", ".join(near_findings([name[:80]]))
        raise UsageError(
            f"there is no finding {name[:80]!r}",
            f"did you mean {near}?" if near else "finding_help without an id lists all",
        )
    page = asdict(read_page(name))
    return {"schema": 1, **page, "text": [line for line in page["text"].splitlines() if line]}


def _hang(question: HangQuestion, folders: AllowedFolders) -> dict[str, Any]:
    """Ask the verb's own function."""
    from stepscope.ui.api import hang

    path = folders.resolve(question.path)
    answer: dict[str, Any] = msgspec.to_builtins(hang(path))
    for name in ("why", "next"):  # sentences, as every tool has them
        if not isinstance(answer[name], str):
            answer[name] = "; ".join(answer[name])
    return _in_order({"schema": 1, **answer}, ("verdict", "why", "next"))


def _tune(question: TuneQuestion, folders: AllowedFolders) -> dict[str, Any]:
    """Show a tune that has ended; the server runs new ones."""
    from stepscope.trace.run_folder.related_runs import read_tune
    from stepscope.ui.tried_remedies import tune_answer

    folder = folders.resolve(question.folder)
    result = read_tune(folder)
    said: dict[str, Any] = msgspec.to_builtins(tune_answer(result, folder))
    answer: dict[str, Any] = {**msgspec.to_builtins(result), **said}
    patch = answer.get("patch")
    answer["patch"] = patch.splitlines() if patch else None
    return _in_order(answer, ("verdict", "why", "next", "kept", "speedup", "patch", "trials"))


def _run(question: RunQuestion, folders: AllowedFolders) -> dict[str, Any]:
    """Only the server runs commands, and then asks for an explanation."""
    raise AssertionError((question, folders))


def _in_order(answer: dict[str, Any], first: Sequence[str]) -> dict[str, Any]:
    names = ["schema", *(name for name in first if name in answer)]
    return {name: answer[name] for name in names} | answer


TOOLS = {
    "explain": Tool(
        ExplainQuestion,
        "Explain where each step of a recorded training goes: verdict, why, next, findings with "
        "changes and what they save, then every table, page by page.",
        _explain,
    ),
    "whatif": Tool(
        WhatifQuestion,
        "Predict what changes would save, with a 95% interval, before anybody makes them.",
        _whatif,
    ),
    "compare": Tool(
        CompareQuestion,
        "Tell whether the step really changed from run A to run B, with a 95% interval.",
        _compare,
    ),
    "find_runs": Tool(
        RunsQuestion, "List recorded runs, the newest first: state, step, verdict.", _find_runs
    ),
    "finding_help": Tool(
        FindingQuestion,
        "Explain a finding: why it costs, how sure it is, what to do.",
        _finding_help,
    ),
    "hang": Tool(HangQuestion, "Say which rank of a job hangs, where, and since when.", _hang),
    "tune": Tool(
        TuneQuestion,
        "Run a training command with changes in short trials and keep what is faster. It takes "
        "minutes, and its work is lost.",
        _tune,
        runs_commands=True,
    ),
    "run": Tool(
        RunQuestion,
        "Run a training command, record it, and explain it. `explain` has the next pages.",
        _run,
        runs_commands=True,
    ),
}


def input_schema(question: type[Question]) -> dict[str, Any]:
    """Return the JSON schema of what a tool takes."""
    (_,), components = msgspec.json.schema_components([question])
    schema: dict[str, Any] = components[question.__name__]
    return {
        "type": "object",
        "properties": schema["properties"],
        "required": schema.get("required", []),
        "additionalProperties": False,
    }


def parse_question(tool: str, arguments: Any) -> Question:
    """Return the arguments as the tool's record. UsageError says what is wrong with them."""
    if tool not in TOOLS:
        raise UsageError(f"there is no tool {tool[:80]!r}", f"the tools are {', '.join(TOOLS)}")
    try:
        return msgspec.convert(arguments, TOOLS[tool].question)
    except msgspec.ValidationError as error:
        names = ", ".join(TOOLS[tool].question.__struct_fields__)
        raise UsageError(f"{tool}: {error}", f"{tool} takes {names}") from None


# Resources: documents of the package.

_FINDING, _FIELDS = "stepscope://findings/", "stepscope://json/"
_MARKDOWN = "text/markdown"
_SECTION = re.compile(r"(?m)^## (.+)$")
_TABLE = re.compile(r"(?m)^### (.+)$")


class Resource(NamedTuple):
    """One document."""

    uri: str
    name: str
    about: str
    kind: str


def list_resources() -> list[Resource]:
    from stepscope.ui.cli.why import list_findings

    pages = [
        Resource(f"{_FINDING}{row.id}", row.id, f"{row.group}: {row.summary}", _MARKDOWN)
        for row in list_findings()
    ]
    fields = [
        Resource(f"{_FIELDS}{name}", f"JSON: {title}", "What these fields mean.", _MARKDOWN)
        for name, (title, _) in _json_sections().items()
    ]
    return [*fields, *pages]


def read_resource(uri: str) -> tuple[str, str]:
    """Return the kind and the text. UsageError for an address that is not listed."""
    from stepscope.ui.cli.why import finding_ids, read_page

    name = uri.removeprefix(_FINDING)
    if uri.startswith(_FINDING) and name in finding_ids():
        return _MARKDOWN, read_page(name).text
    sections = _json_sections()
    name = uri.removeprefix(_FIELDS)
    if uri.startswith(_FIELDS) and name in sections:
        return _MARKDOWN, sections[name][1]
    raise UsageError(f"there is no resource {one_line(uri)[:120]!r}")


@functools.cache
def _json_sections() -> dict[str, tuple[str, str]]:
    """Return the sections of the reference page by a short name: title and text."""
    places = ("pages/json.md", "../../../docs/reference/json.md")  # in a checkout, still in docs
    found = [place for place in places if (Path(__file__).parents[1] / place).is_file()]
    page = (Path(__file__).parents[1] / found[0]).read_text("utf-8") if found else ""
    head, *rest = _SECTION.split(page)
    sections = {"start": ("units and names", head)} if head else {}
    for title, text in zip(rest[::2], rest[1::2], strict=True):
        first, *tables = _TABLE.split(text)
        name = _short(title)
        if first.strip():
            sections |= _bounded(name, title, f"## {title}\n{first.strip()}\n")
        for table, rows in zip(tables[::2], tables[1::2], strict=True):
            both = f"{title}: {table}"
            sections |= _bounded(f"{name}/{_short(table)}", both, f"## {both}\n{rows.strip()}\n")
    return sections


def _bounded(name: str, title: str, text: str) -> dict[str, tuple[str, str]]:
    """Cut a table in two that is longer than an answer may be."""
    from stepscope.ui.mcp.pages import MOST_TOKENS, count_tokens

    head, line, rows = text.rpartition("---|\n")
    if not rows or count_tokens(text) <= MOST_TOKENS:
        return {name: (title, text)}
    lines = rows.splitlines(keepends=True)
    middle = len(lines) // 2
    halves = ("".join(lines[:middle]), "".join(lines[middle:]))
    more = f"{title}, continued"
    return {
        name: (title, f"{head}{line}{halves[0]}"),
        f"{name}/2": (more, f"{head}{line}{halves[1]}"),
    }


def _short(title: str) -> str:
    return re.sub(r"\W+", "-", title.replace("--json", "").lower()).strip("-")
