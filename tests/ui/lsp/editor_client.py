"""An editor for tests: pygls' own client, with texts that it edits, saves and undoes."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsprotocol import types
from pygls.lsp.client import LanguageClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

WAIT_S = 90.0  # for an event; machines are loaded
MADE = [sys.executable, str(Path(__file__).parent / "made_room.py")]
REAL = [sys.executable, "-m", "stepscope", "lsp"]


class Editor:
    """One server process and the texts that are open in it."""

    def __init__(self) -> None:
        self.client = LanguageClient("editor", "1")
        self.texts: dict[str, str] = {}
        self.undo: dict[str, list[str]] = {}
        self.versions: dict[str, int] = {}
        self.diagnostics: dict[str, types.PublishDiagnosticsParams] = {}
        self.messages: list[str] = []
        self.live: list[Any] = []
        self.bars: dict[Any, list[str]] = {}  # kinds of messages, by token
        self.changed = 0
        self._event = asyncio.Event()
        self._listen()

    def _listen(self) -> None:
        @self.client.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        def publish(params: types.PublishDiagnosticsParams) -> None:
            self.diagnostics[params.uri] = params
            self._event.set()

        @self.client.feature(types.WINDOW_SHOW_MESSAGE)
        def show(params: types.ShowMessageParams) -> None:
            self.messages.append(params.message)
            self._event.set()

        @self.client.feature("stepscope/changed")
        def changed(params: Any) -> None:
            self.changed += 1
            self._event.set()

        @self.client.feature("stepscope/live")
        def live(params: Any) -> None:
            self.live.append(params)
            self._event.set()

        @self.client.feature(types.WINDOW_WORK_DONE_PROGRESS_CREATE)
        def create(params: types.WorkDoneProgressCreateParams) -> None:
            self.bars.setdefault(params.token, [])

        @self.client.feature(types.PROGRESS)
        def progress(params: types.ProgressParams) -> None:
            value = params.value
            kind = value["kind"] if isinstance(value, dict) else value.kind
            self.bars.setdefault(params.token, []).append(kind)
            self._event.set()

        @self.client.feature(types.WORKSPACE_APPLY_EDIT)
        def apply(params: types.ApplyWorkspaceEditParams) -> types.ApplyWorkspaceEditResult:
            self.apply(params.edit)
            return types.ApplyWorkspaceEditResult(applied=True)

        @self.client.feature(types.WORKSPACE_INLAY_HINT_REFRESH)
        def refresh(params: None) -> None:
            self._event.set()

    async def until(self, seen: Callable[[], Any]) -> None:
        """Wait for messages of the server until this is true."""
        async with asyncio.timeout(WAIT_S):
            while not seen():
                self._event.clear()
                await self._event.wait()

    async def until_hint(self, uri: str, words: str) -> dict[int, str]:
        """Ask for hints, again after each message, until one holds these words."""
        async with asyncio.timeout(WAIT_S):
            while True:
                self._event.clear()
                hints = await self.hints(uri)
                if any(words in hint for hint in hints.values()):
                    return hints
                error = (await self.panel(uri)).error
                assert not (error or "").startswith("no estimate"), error
                await self._event.wait()

    def open(self, path: Path) -> str:
        uri = path.as_uri()
        self.texts[uri], self.versions[uri] = path.read_text(), 1
        self.undo[uri] = []
        item = types.TextDocumentItem(uri, "python", 1, self.texts[uri])
        self.client.text_document_did_open(types.DidOpenTextDocumentParams(item))
        return uri

    def edit(self, uri: str, text: str) -> None:
        self.undo[uri].append(self.texts[uri])
        self._send(uri, text)

    def take_back(self, uri: str) -> None:
        """Undo, as an editor does it."""
        self._send(uri, self.undo[uri].pop())

    def _send(self, uri: str, text: str) -> None:
        self.texts[uri] = text
        self.versions[uri] += 1
        self.client.text_document_did_change(
            types.DidChangeTextDocumentParams(
                types.VersionedTextDocumentIdentifier(uri=uri, version=self.versions[uri]),
                [types.TextDocumentContentChangeWholeDocument(text)],
            )
        )

    def save(self, uri: str, path: Path) -> None:
        path.write_text(self.texts[uri])
        document = types.TextDocumentIdentifier(uri)
        self.client.text_document_did_save(types.DidSaveTextDocumentParams(document))

    def apply(self, edit: types.WorkspaceEdit) -> None:
        for change in edit.document_changes or ():
            assert isinstance(change, types.TextDocumentEdit)
            uri = change.text_document.uri
            assert change.text_document.version == self.versions[uri]
            lines = self.texts[uri].split("\n")
            for one in sorted(change.edits, key=lambda e: e.range.start.line, reverse=True):
                _replace(lines, one)
            self.edit(uri, "\n".join(lines))

    async def hints(self, uri: str) -> dict[int, str]:
        """By line, from 0."""
        everything = types.Range(types.Position(0, 0), types.Position(100_000, 0))
        params = types.InlayHintParams(types.TextDocumentIdentifier(uri), everything)
        hints = await self.client.text_document_inlay_hint_async(params)
        return {hint.position.line: str(hint.label) for hint in hints or ()}

    async def lenses(self, uri: str) -> dict[int, str]:
        params = types.CodeLensParams(types.TextDocumentIdentifier(uri))
        lenses = await self.client.text_document_code_lens_async(params)
        return {one.range.start.line: one.command.title for one in lenses or () if one.command}

    async def hover(self, uri: str, line: int) -> str:
        params = types.HoverParams(types.TextDocumentIdentifier(uri), types.Position(line, 4))
        hover = await self.client.text_document_hover_async(params)
        return "" if hover is None else hover.contents.value

    async def actions(self, uri: str, line: int) -> list[types.CodeAction]:
        params = types.CodeActionParams(
            types.TextDocumentIdentifier(uri),
            types.Range(types.Position(line, 0), types.Position(line, 4)),
            types.CodeActionContext([]),
        )
        return list(await self.client.text_document_code_action_async(params) or ())

    async def command(self, name: str, *arguments: Any) -> Any:
        params = types.ExecuteCommandParams(f"stepscope.{name}", list(arguments))
        return await self.client.workspace_execute_command_async(params)

    async def panel(self, uri: str) -> Any:
        return await self.client.protocol.send_request_async("stepscope/panel", {"uri": uri})


def _replace(lines: list[str], edit: types.TextEdit) -> None:
    start, end = edit.range.start, edit.range.end
    if end.line == len(lines):  # the end of the text
        end = types.Position(len(lines) - 1, len(lines[-1]))
    first, last = lines[start.line], lines[end.line]
    text = first[: start.character] + edit.new_text + last[end.character :]
    lines[start.line : end.line + 1] = text.split("\n")


@asynccontextmanager
async def editor(
    command: list[str], root: Path, options: dict[str, Any] | None = None
) -> AsyncIterator[Editor]:
    """The server must leave with exit code 0."""
    one = Editor()
    await one.client.start_io(*command, cwd=root)
    capabilities = types.ClientCapabilities(
        window=types.WindowClientCapabilities(work_done_progress=True),
        workspace=types.WorkspaceClientCapabilities(
            workspace_edit=types.WorkspaceEditClientCapabilities(document_changes=True),
            inlay_hint=types.InlayHintWorkspaceClientCapabilities(refresh_support=True),
        ),
    )
    await one.client.initialize_async(
        types.InitializeParams(
            capabilities=capabilities, root_uri=root.as_uri(), initialization_options=options
        )
    )
    one.client.initialized(types.InitializedParams())
    try:
        yield one
        async with asyncio.timeout(WAIT_S):
            await one.client.shutdown_async(None)
            one.client.exit(None)
            await one.client._server.wait()
        assert one.client._server.returncode == 0
    finally:
        if one.client._server.returncode is None:
            one.client._server.kill()
        await one.client.stop()
