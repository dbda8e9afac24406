"""The live routes behind a real server, with a page that holds nothing but the live section."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

from stepscope.ui.serve.live_routes import LiveAnswers

PAGE = Path(__file__).parent.parent / "src/stepscope/ui/serve/page"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"


@dataclass(frozen=True)
class OneFolder:
    id: str
    path: Path
    kind: str = "run"
    stamp: str = ""


@dataclass(frozen=True)
class Folders:
    """Runs by id, as serve's own directory of runs has them."""

    folders: dict[str, Path]

    def folder_of(self, run_id: str) -> Path | None:
        folder = self.folders.get(run_id)
        return folder if folder is not None and folder.is_dir() else None

    def scan(self) -> list[OneFolder]:
        return [OneFolder(run_id, path) for run_id, path in self.folders.items() if path.is_dir()]


async def page(request: Request) -> Response:
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>run</title>'
        '<link rel="icon" href="data:,"><link rel="stylesheet" href="/live.css"></head><body>'
        f'<main><section id="live" data-run="{request.path_params["run_id"]}"></section></main>'
        '<script src="/live.js"></script></body></html>'
    )
    headers = {"content-security-policy": f"{POLICY}; img-src data:"}
    return HTMLResponse(text, headers=headers)


async def file(request: Request) -> Response:
    return FileResponse(PAGE / request.url.path.lstrip("/"))


@contextlib.contextmanager
def serving(folders: dict[str, Path]) -> Iterator[str]:
    """The server's address."""
    routes = [
        *LiveAnswers(Folders(folders)).routes(),
        Route("/runs/{run_id}", page),
        Route("/live.js", file),
        Route("/live.css", file),
    ]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            Starlette(routes=routes), log_level="error", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
