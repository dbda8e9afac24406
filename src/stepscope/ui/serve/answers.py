"""How pages answer: styles and scripts, errors as pages, and the report's pages as they are."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, HTMLResponse

from stepscope.errors import NotCapturedError, StepscopeError, UnreadableInputError, UsageError
from stepscope.trace.regular_files import read_start
from stepscope.ui.html.render import shared_block
from stepscope.ui.serve.page_files import render
from stepscope.ui.serve.served_runs import GoneError
from stepscope.ui.serve.worker_process import WorkerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from starlette.requests import Request
    from starlette.responses import Response

    Page = Callable[[Request], Response]

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
    """A page with the head that all pages have."""
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


def part(template: str, status: int = 200, **context: Any) -> HTMLResponse:
    """A piece that a script puts into a page."""
    return HTMLResponse(render(template, **context), status_code=status)


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
            return _problem_page("; ".join(map(str, error.args)), status_of(error), request)

    return answer


def _problem_page(problem: str, status: int, request: Request) -> HTMLResponse:
    framed = request.headers.get("sec-fetch-dest") == "iframe"
    title = "Not found" if status == 404 else "This cannot be shown"
    shown = shown_status(request, status, "iframe")
    answer = page("problem.html.j2", status=shown, title=title, problem=problem)
    if framed:
        answer.headers["content-security-policy"] = f"{_FRAMED}; frame-ancestors 'self'"
    return answer


def report_page(file: Path) -> FileResponse:
    """A page that the report's code made, with its own policy in the header as well."""
    found = _POLICY.search(read_start(file, _HEAD_BYTES))
    own = (
        found[1].decode("ascii", "replace").replace("&#39;", "'") if found else "default-src 'none'"
    )
    return FileResponse(
        file,
        media_type="text/html",
        headers={"content-security-policy": f"{own}; frame-ancestors 'self'"},
    )
