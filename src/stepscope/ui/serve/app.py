"""The web application: the pages of one served folder, behind the guard."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse

from stepscope.ui.serve.guard import Guard
from stepscope.ui.serve.live.routes import LiveAnswers
from stepscope.ui.serve.routes import RunPages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from stepscope.ui.serve.served_runs import ServedRuns


def make_app(served: ServedRuns, token: str, *, cookie: str = "stepscope") -> ASGIApp:
    """Closing the application closes `served`."""
    live = LiveAnswers(served.directory)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        served.keeper.start()
        try:
            yield
        finally:
            live.close()
            served.close()

    app = Starlette(
        routes=[*live.routes(), *RunPages(served).routes()],
        lifespan=lifespan,
        exception_handlers={404: _not_found, 500: _defect},
    )
    return Guard(app, token, cookie)


async def _not_found(_: Request, __: Exception) -> PlainTextResponse:
    return PlainTextResponse("not found\n", status_code=404)


async def _defect(_: Request, error: Exception) -> PlainTextResponse:
    words = f"a defect in stepscope: {type(error).__name__}: {error}\n"
    return PlainTextResponse(words, status_code=500)
