"""The pages: what each address shows, and how it is answered, with templates and scripts of
`serve`, else the report's.
"""

from __future__ import annotations

import functools
import re
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode

from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Route

from stepscope.errors import NotCapturedError, StepscopeError, UnreadableInputError, UsageError
from stepscope.trace.files import read_start
from stepscope.ui.html.render import make_environment, read_page_file, shared_block
from stepscope.ui.serve.listed_runs import RUNNING, IndexedRun
from stepscope.ui.serve.run_rows import (
    ListQuery,
    RunWords,
    compare_address,
    describe,
    list_context,
    list_series,
    make_trend,
    run_json,
    runs_of_series,
    trend_address,
)
from stepscope.ui.serve.served_runs import GoneError, ServedRuns, WorkerError

if TYPE_CHECKING:
    from starlette.requests import Request

    Page = Callable[[Request], Response]

_CHANGES = 3  # rows of the what-if form
_MOST_CHANGES = 8
_MOST_FORM = 8192
_NEWEST_PROMISES = 200


class RunPages:
    """All pages of one served folder."""

    def __init__(self, served: ServedRuns) -> None:
        self._served = served
        self._tables = ListTables(served)

    def routes(self) -> list[Route]:
        pages = {
            "/": self.list,
            "/rows": self.rows,
            "/runs.json": self.json,
            "/runs/{id}": self.run,
            "/runs/{id}/report": self.report,
            "/runs/{id}/whatif": self.whatif,
            "/runs/{id}/predictions": self.predictions,
            "/compare": self.compare,
            "/compare/page": self.comparison,
            "/trends": self.trends,
            "/record": self.record,
            "/page/{name}": self.file,
        }
        return [
            *(Route(path, answered(make), methods=["GET"]) for path, make in pages.items()),
            Route("/runs/{id}/tags", self.set_tags, methods=["POST"]),
        ]

    def list(self, request: Request) -> Response:
        query = ListQuery.from_address(request.query_params)
        table = self._tables.table(query)
        return page(
            "runs.html.j2",
            title="Runs",
            here="/",
            query=query,
            tag=table.tag,
            table=Markup(table.text),
        )

    def rows(self, request: Request) -> Response:
        """Answer the list alone; 304 if it is still the one that the page has."""
        table = self._tables.table(ListQuery.from_address(request.query_params))
        if request.headers.get("if-none-match") == table.tag:
            return Response(status_code=304, headers={"etag": table.tag})
        return HTMLResponse(table.text, headers={"etag": table.tag})

    def json(self, request: Request) -> Response:
        del request
        tags = self._served.tags.all()
        runs = self._served.index.runs()
        rows = [run_json(run, tags.get(run.id, ())) for run in runs]
        return JSONResponse({"schema": 1, "runs": rows})

    def run(self, request: Request) -> Response:
        run = self._find(request)
        row = self._describe(run)
        live = run.state == RUNNING
        readable = run.kind != "none"
        return page(
            "run.html.j2",
            title=row.name,
            row=row,
            facts=_facts(row, live=live),
            ways=_links(run) if readable else [],
            live=live,
            framed=f"/runs/{run.id}/report" if readable and not live else "",
            styles=("live.css",) if live else (),
            scripts=("live.js",) if live else (),
        )

    def report(self, request: Request) -> Response:
        return report_page(self._served.report(self._find(request)))

    async def set_tags(self, request: Request) -> Response:
        """Take the form of the run's page; then go back to it."""
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > _MOST_FORM:
                return PlainTextResponse("too long\n", status_code=413)
        words = parse_qs(body.decode("utf-8", "replace")).get("tags", [""])[0].split(",")

        def save(request: Request) -> Response:
            run = self._find(request)
            self._served.tags.set(run.id, words)
            self._tables.forget()
            return RedirectResponse(f"/runs/{run.id}", status_code=303)

        return await answered(save)(request)

    def compare(self, request: Request) -> Response:
        a, b = self._pair(request)
        return page(
            "compare.html.j2",
            title=f"{b.name} against {a.name}",
            a=self._describe(a),
            b=self._describe(b),
            swapped=compare_address(b, a),
            framed=compare_address(a, b, "/compare/page"),
        )

    def comparison(self, request: Request) -> Response:
        return report_page(self._served.comparison(*self._pair(request)))

    def whatif(self, request: Request) -> Response:
        from stepscope.changes import PREDICTED

        run = self._find(request)
        self._served.folder(run)
        chosen = _changes(request)
        rows = [*chosen, *[("", "")] * max(1, _CHANGES - len(chosen))][:_MOST_CHANGES]
        return page(
            "whatif.html.j2",
            title=f"What if: {run.name}",
            row=self._describe(run),
            chosen=rows,
            whatifs=[(name, change.help) for name, change in PREDICTED.items()],
            source=_whatif_address(run, "predictions", chosen),
        )

    def predictions(self, request: Request) -> Response:
        """Render a part of a page: an error is a sentence in it."""
        run = self._find(request)
        settings = [f"{name}={value}" if value else name for name, value in _changes(request)]
        try:
            answer = self._served.predictions(run, settings)
        except StepscopeError as error:
            sentence = Markup('<p class="note">{}</p>').format("; ".join(map(str, error.args)))
            return HTMLResponse(sentence, status_code=shown_status(request, status_of(error)))
        if "application/json" in request.headers.get("accept", ""):
            return JSONResponse([row["json"] for row in answer["rows"]])
        for row in answer["rows"]:
            pairs = [tuple(setting.partition("=")[::2]) for setting in row["settings"]]
            row["target"] = _whatif_address(run, "whatif", pairs)
        return HTMLResponse(render("predictions.html.j2", **answer))

    def trends(self, request: Request) -> Response:
        runs = self._served.index.runs()
        script = request.query_params.get("script")
        context: dict[str, Any] = {"series": None, "listed": []}
        if script is None:
            context["listed"] = list_series(runs)
        else:
            ranks = request.query_params.get("ranks", "1")
            device = request.query_params.get("device", "")
            chosen = runs_of_series(runs, script, device, int(ranks) if ranks.isdecimal() else 1)
            if not chosen:
                raise UsageError(
                    "no run of this script, device and number of ranks has a step time"
                )
            context["series"] = make_trend(chosen)
        return page("trends.html.j2", title="Trends", here="/trends", **context)

    def record(self, request: Request) -> Response:
        from stepscope.ui.topics import comparison as topic
        from stepscope.verify import track_record

        del request
        promises = track_record.history()
        ignored = track_record.ignored_deliveries()
        notes = [topic.ignored_words(delivery, why) for delivery, why in ignored]
        if unread := track_record.count_unread():
            notes.append(topic.unread_words(unread))
        newest = topic.newest_first(promises)[:_NEWEST_PROMISES]
        summaries = [topic.summary_cells(row) for row in track_record.summarise(promises)]
        rows = [topic.promise_cells(row) for row in newest]
        return page(
            "record.html.j2",
            title="Track record",
            here="/record",
            answer=topic.record_answer(promises),
            notes=notes,
            tables=[
                ("What-ifs", topic.SUMMARY_COLUMNS, summaries),
                ("Predictions", topic.PROMISE_COLUMNS, rows),
            ],
        )

    def file(self, request: Request) -> Response:
        found = page_file(request.path_params["name"])
        if found is None:
            return PlainTextResponse("no such file\n", status_code=404)
        return Response(found[0], media_type=found[1])

    def _find(self, request: Request) -> IndexedRun:
        return self._served.run(request.path_params["id"])

    def _describe(self, run: IndexedRun) -> RunWords:
        return describe(run, self._served.tags.all().get(run.id, ()))

    def _pair(self, request: Request) -> tuple[IndexedRun, IndexedRun]:
        """Return A and B as the address says; of two that were only ticked, the older one is A."""
        given = request.query_params
        if "a" in given and "b" in given:
            return self._served.run(given["a"]), self._served.run(given["b"])
        ticked = given.getlist("run")
        if len(ticked) != 2 or ticked[0] == ticked[1]:
            raise UsageError("a comparison needs two runs: tick two in the list")
        older, newer = sorted(map(self._served.run, ticked), key=lambda run: run.started_unix or 0)
        return older, newer


def _facts(row: RunWords, *, live: bool) -> list[tuple[str, str]]:
    """While a run trains, the live section has the figures that change."""
    figures = [
        ("State", row.state),
        ("Step", row.step),
        ("MFU", row.mfu),
        ("Memory peak", row.memory),
    ]
    rest = [("Device", row.device), ("Started", row.started), ("Script", row.script or "-")]
    return rest if live else [*figures, *rest]


def _links(run: IndexedRun) -> list[tuple[str, str]]:
    links = [("What if", f"/runs/{run.id}/whatif")]
    if run.script and run.step_ms and run.kind == "run":
        links.append(("Trend of this script", trend_address(run)))
    if run.state != RUNNING:
        links.append(("Report alone", f"/runs/{run.id}/report"))
    return links


def _changes(request: Request) -> list[tuple[str, str]]:
    """Return the form's rows that name a change."""
    names = request.query_params.getlist("change")[:_MOST_CHANGES]
    values = request.query_params.getlist("value")[:_MOST_CHANGES]
    pairs = zip_longest(names, values, fillvalue="")
    return [(name, value.strip()) for name, value in pairs if name]


def _whatif_address(run: IndexedRun, where: str, changes: Sequence[tuple[str, ...]]) -> str:
    words = [pair for name, value in changes for pair in (("change", name), ("value", value))]
    return f"/runs/{run.id}/{where}" + (f"?{urlencode(words)}" if words else "")


# How pages answer: styles and scripts, errors as pages, and the report's pages as they are.

_STYLES = ("report.css", "serve.css")
_STATUS: tuple[tuple[type[StepscopeError], int], ...] = (
    (GoneError, 404),
    (UsageError, 400),
    (NotCapturedError, 422),
    (UnreadableInputError, 422),
    (WorkerError, 503),
)
_POLICY = re.compile(rb'<meta http-equiv="Content-Security-Policy" content="([^"<>\r\n]+)">')
_HEAD_BYTES = 4096
# In a frame the text is seen by whoever looks at the page around it.
_FRAMED = "default-src 'none'; style-src 'self'; script-src 'self'; img-src data:"


def page(
    template: str,
    *,
    status: int = 200,
    here: str = "",
    styles: tuple[str, ...] = (),
    scripts: tuple[str, ...] = (),
    **context: Any,
) -> HTMLResponse:
    """Render a page with the head that all pages have."""
    text = render(
        template,
        here=here,
        styles=(*_STYLES, *styles),
        scripts=("serve.js", *scripts),
        script=True,
        shared=shared_block(),
        **context,
    )
    return HTMLResponse(text, status_code=status)


def status_of(error: StepscopeError) -> int:
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def shown_status(request: Request, status: int, asked_for: str = "empty") -> int:
    """200 for a problem that the page shows itself: browsers log every other status as an error.

    `asked_for` is how the page asks: its script ("empty") or a frame ("iframe").
    """
    return 200 if request.headers.get("sec-fetch-dest") == asked_for else status


def answered(make: Page) -> Callable[[Request], Awaitable[Response]]:
    """Make a page in a thread of its own; what went wrong becomes a page, too."""

    @functools.wraps(make)
    async def answer(request: Request) -> Response:
        try:
            return await run_in_threadpool(make, request)
        except StepscopeError as error:
            status = status_of(error)
            problem = page(
                "problem.html.j2",
                status=shown_status(request, status, "iframe"),
                title="Not found" if status == 404 else "This cannot be shown",
                problem="; ".join(map(str, error.args)),
            )
            if request.headers.get("sec-fetch-dest") == "iframe":
                problem.headers["content-security-policy"] = f"{_FRAMED}; frame-ancestors 'self'"
            return problem

    return answer


def report_page(file: Path) -> FileResponse:
    """Serve a page that the report's code made, with its own policy in the header as well."""
    found = _POLICY.search(read_start(file, _HEAD_BYTES))
    own = found[1].decode("ascii", "replace") if found else "default-src 'none'"
    policy = f"{own.replace('&#39;', chr(39))}; frame-ancestors 'self'"
    return FileResponse(file, media_type="text/html", headers={"content-security-policy": policy})


# Templates, scripts and style sheets of the pages: those of `serve`, else the report's.

_ROOMS = ("stepscope.ui.serve", "stepscope.ui.html")
_TYPES = {"js": "text/javascript", "css": "text/css"}


def render(template: str, **context: Any) -> str:
    """Render a page, or a part of one."""
    text: str = _environment().get_template(template).render(**context)
    return text


@cache
def page_file(name: str) -> tuple[str, str] | None:
    """Text and media type of a script or style sheet; None for any other name."""
    if name not in _names():
        return None
    return _read(name), _TYPES[name.rpartition(".")[2]]


@cache
def _names() -> frozenset[str]:
    """List what lies in the two folders: a name from an address never becomes a path."""
    folders = [files(room).joinpath("page") for room in _ROOMS]
    names = (entry.name for folder in folders for entry in folder.iterdir())
    return frozenset(name for name in names if name.endswith((".js", ".css")))


def _read(name: str) -> str:
    try:
        return files("stepscope.ui.serve").joinpath("page", name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return read_page_file(name)


@cache
def _environment() -> Any:
    return make_environment(_read)


# The list as HTML, made once for all browsers that show it: at most once a second.

_MOST_KEPT = 8
_FRESH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListTable:
    """`tag` is another one whenever the list is."""

    text: str
    tag: str
    made_s: float
    generation: int
    problem: str | None


class ListTables:
    """The last few lists that were asked for."""

    def __init__(self, served: ServedRuns) -> None:
        self._served = served
        self._born = secrets.token_hex(4)  # lists of an earlier server are other lists
        self._kept: dict[ListQuery, ListTable] = {}
        self._lock = threading.Lock()

    def table(self, query: ListQuery) -> ListTable:
        """Return the list, not older than a second if anything has changed since."""
        with self._lock:  # whoever waits gets what the first one made
            table = self._kept.pop(query, None)
            if table is None or not self._is_fresh(table):
                served = self._served
                generation, problem = served.index.generation, served.keeper.problem
                runs = served.index.runs(order=query.order, descending=query.descending)
                waiting = sum(run.kind != "none" and run.summarised is None for run in runs)
                context = list_context(runs, query, served.tags.all(), waiting)
                table = ListTable(
                    text=render("rows.html.j2", problem=problem, **context),
                    tag=f'"{self._born}-{generation}-{abs(hash((query, problem))):x}"',
                    made_s=time.monotonic(),
                    generation=generation,
                    problem=problem,
                )
            self._kept[query] = table
            while len(self._kept) > _MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))
            return table

    def forget(self) -> None:
        """Make lists anew: who has changed something wants to see it."""
        with self._lock:
            self._kept.clear()
            self._born = secrets.token_hex(4)

    def _is_fresh(self, table: ListTable) -> bool:
        if table.problem != self._served.keeper.problem:
            return False
        if table.generation == self._served.index.generation:
            return True
        return time.monotonic() - table.made_s < _FRESH_S
