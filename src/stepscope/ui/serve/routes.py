"""The pages: what each address shows."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode

from markupsafe import Markup
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Route

from stepscope.errors import StepscopeError, UsageError
from stepscope.ui.serve.answers import (
    answered,
    page,
    part,
    report_page,
    shown_status,
    status_of,
)
from stepscope.ui.serve.list_tables import ListTables
from stepscope.ui.serve.page_files import has_page_file, page_file
from stepscope.ui.serve.run_rows import (
    ListQuery,
    compare_address,
    describe,
    run_json,
    trend_address,
)
from stepscope.ui.serve.run_summary import RUNNING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from starlette.requests import Request

    from stepscope.ui.serve.run_index import IndexedRun
    from stepscope.ui.serve.run_rows import RunWords
    from stepscope.ui.serve.served_runs import ServedRuns

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
        """The list alone; 304 if it is still the one that the page has."""
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
            **_live_files(live),
        )

    def report(self, request: Request) -> Response:
        return report_page(self._served.report(self._find(request)))

    async def set_tags(self, request: Request) -> Response:
        """A form of the run's page; then back to it."""
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
        from stepscope.predict.whatifs import WHATIFS

        run = self._find(request)
        self._served.folder(run)
        chosen = _changes(request)
        rows = [*chosen, *[("", "")] * max(1, _CHANGES - len(chosen))][:_MOST_CHANGES]
        return page(
            "whatif.html.j2",
            title=f"What if: {run.name}",
            row=self._describe(run),
            chosen=rows,
            whatifs=[(whatif.name, whatif.help) for whatif in WHATIFS.values()],
            source=_whatif_address(run, "predictions", chosen),
        )

    def predictions(self, request: Request) -> Response:
        """A part of a page: an error is a sentence in it."""
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
        return part("predictions.html.j2", **answer)

    def trends(self, request: Request) -> Response:
        from stepscope.ui.serve.trend_view import list_series, make_trend, runs_of_series

        runs = self._served.index.runs()
        script = request.query_params.get("script")
        if script is None:
            scripts = list_series(runs)
            return page(
                "trends.html.j2", title="Trends", here="/trends", series=None, listed=scripts
            )
        ranks = request.query_params.get("ranks", "1")
        device = request.query_params.get("device", "")
        chosen = runs_of_series(runs, script, device, int(ranks) if ranks.isdecimal() else 1)
        if not chosen:
            raise UsageError("no run of this script, device and number of ranks has a step time")
        return page(
            "trends.html.j2",
            title="Trends",
            here="/trends",
            series=make_trend(chosen),
            listed=[],
        )

    def record(self, request: Request) -> Response:
        from stepscope.ui.record import (
            PROMISE_COLUMNS,
            SUMMARY_COLUMNS,
            ignored_words,
            newest_first,
            promise_cells,
            record_answer,
            summary_cells,
            unread_words,
        )
        from stepscope.verify.record_file import count_unread
        from stepscope.verify.track_record import history, ignored_deliveries, summarise

        del request
        kept = history()
        notes = [ignored_words(delivery, why) for delivery, why in ignored_deliveries()]
        notes += [unread_words(unread)] if (unread := count_unread()) else []
        newest = newest_first(kept)[:_NEWEST_PROMISES]
        return page(
            "record.html.j2",
            title="Track record",
            here="/record",
            answer=record_answer(kept),
            notes=notes,
            tables=[
                ("What-ifs", SUMMARY_COLUMNS, [summary_cells(row) for row in summarise(kept)]),
                ("Predictions", PROMISE_COLUMNS, [promise_cells(row) for row in newest]),
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
        """A and B as the address says; of two that were only ticked, the older one is A."""
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


def _live_files(live: bool) -> dict[str, Any]:
    """The script that follows a run, where it is installed."""
    if not live:
        return {}
    styles = tuple(name for name in ("live.css",) if has_page_file(name))
    return {
        "styles": styles,
        "scripts": tuple(name for name in ("live.js",) if has_page_file(name)),
    }


def _changes(request: Request) -> list[tuple[str, str]]:
    """The form's rows that name a change."""
    names = request.query_params.getlist("change")[:_MOST_CHANGES]
    values = request.query_params.getlist("value")[:_MOST_CHANGES]
    pairs = zip_longest(names, values, fillvalue="")
    return [(name, value.strip()) for name, value in pairs if name]


def _whatif_address(run: IndexedRun, where: str, changes: Sequence[tuple[str, ...]]) -> str:
    words = [pair for name, value in changes for pair in (("change", name), ("value", value))]
    return f"/runs/{run.id}/{where}" + (f"?{urlencode(words)}" if words else "")
