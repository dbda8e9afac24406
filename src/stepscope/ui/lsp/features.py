"""What the server answers: each request in a few lines, from the state of its script."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from lsprotocol import types
from pygls.exceptions import JsonRpcInvalidParams

from stepscope.errors import StepscopeError
from stepscope.ui.editor.batch_curve import batch_for
from stepscope.ui.lsp import shown_types
from stepscope.ui.lsp.batch_now import batch_now
from stepscope.ui.lsp.panel import panel_of
from stepscope.ui.lsp.rebased_change import text_lines
from stepscope.ui.lsp.script_server import ScriptServer, path_of

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.records.line_costs import BatchPlace, BatchPoint
    from stepscope.ui.lsp.measured_run import MeasuredRun
    from stepscope.ui.lsp.script_state import ScriptState
    from stepscope.ui.lsp.work_room import WorkRoom

_SECTION = "stepscope"


def make_server(room: WorkRoom | None = None) -> ScriptServer:
    """`room` does the work that takes long; tests give another."""
    server = ScriptServer(room)
    _add_session(server)
    _add_documents(server)
    _add_views(server)
    _add_commands(server)
    return server


def _add_session(server: ScriptServer) -> None:
    @server.feature(types.INITIALIZE)
    def initialize(params: types.InitializeParams) -> None:
        server.prepare_loop()
        server.first_settings = params.initialization_options

    @server.feature(types.INITIALIZED)
    async def initialized(params: types.InitializedParams) -> None:
        del params
        server.update_settings(server.first_settings)
        await _ask_for_settings(server)

    @server.feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)
    async def configured(params: types.DidChangeConfigurationParams) -> None:
        if params.settings:
            server.update_settings(params.settings)
        else:
            await _ask_for_settings(server)

    @server.feature(types.WINDOW_WORK_DONE_PROGRESS_CANCEL)
    def cancelled(params: types.WorkDoneProgressCancelParams) -> None:
        server.cancelled(params.token)

    @server.feature(types.SHUTDOWN)
    async def shutdown(params: None = None) -> None:
        del params
        server.is_told_to_leave = True
        await server.jobs.close()

    @server.feature(types.EXIT)
    async def leave(params: None = None) -> NoReturn:
        """At once: a thread may still wait for input, and Python would wait for it."""
        del params
        await server.jobs.close()
        sys.stderr.flush()
        os._exit(0 if server.is_told_to_leave else 1)


async def _ask_for_settings(server: ScriptServer) -> None:
    workspace = server.client_capabilities.workspace
    if workspace is None or not workspace.configuration:
        return
    wanted = types.ConfigurationParams([types.ConfigurationItem(section=_SECTION)])
    with contextlib.suppress(Exception):  # an editor that has none: the defaults hold
        (values,) = await server.workspace_configuration_async(wanted)
        server.update_settings(values)


def _add_documents(server: ScriptServer) -> None:
    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def did_open(params: types.DidOpenTextDocumentParams) -> None:
        file = server.opened(params.text_document.uri)
        if file is not None:
            server.edited(file.path)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def did_change(params: types.DidChangeTextDocumentParams) -> None:
        path = path_of(params.text_document.uri)
        if path is not None:
            server.edited(path)

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    def did_save(params: types.DidSaveTextDocumentParams) -> None:
        path = path_of(params.text_document.uri)
        if path is not None:
            server.saved(path)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def did_close(params: types.DidCloseTextDocumentParams) -> None:
        server.closed(params.text_document.uri)


def _add_views(server: ScriptServer) -> None:
    @server.feature(types.TEXT_DOCUMENT_INLAY_HINT)
    def inlay_hints(params: types.InlayHintParams) -> list[types.InlayHint]:
        file = server.file(params.text_document.uri)
        if file is None or not server.settings.hints:
            return []
        first, last = _lines(params.range)
        return shown_types.inlay_hints(
            file, server.state_of(file.path), server.text_of, first, last
        )

    @server.feature(types.TEXT_DOCUMENT_CODE_LENS)
    def code_lenses(params: types.CodeLensParams) -> list[types.CodeLens]:
        file = server.file(params.text_document.uri)
        if file is None or not server.settings.hints:
            return []
        return shown_types.code_lenses(file, server.state_of(file.path), server.text_of)

    @server.feature(types.TEXT_DOCUMENT_HOVER)
    def hover(params: types.HoverParams) -> types.Hover | None:
        file = server.file(params.text_document.uri)
        if file is None:
            return None
        state = server.state_of(file.path)
        return shown_types.hover(file, state, server.text_of, params.position.line)

    @server.feature(
        types.TEXT_DOCUMENT_CODE_ACTION,
        types.CodeActionOptions(
            [types.CodeActionKind.QuickFix, types.CodeActionKind.RefactorRewrite]
        ),
    )
    def code_actions(params: types.CodeActionParams) -> list[types.CodeAction]:
        file = server.file(params.text_document.uri)
        if file is None:
            return []
        first, last = _lines(params.range)
        state = server.state_of(file.path)
        actions = shown_types.code_actions(file, state, server.text_of, first, last, server.edits())
        only = params.context.only
        return [one for one in actions if not only or _is_of(one.kind, only)]

    @server.feature("stepscope/panel")
    def panel(params: Any) -> dict[str, Any]:
        try:
            state = _state(server, _field(params, "uri"))
        except StepscopeError as error:
            raise JsonRpcInvalidParams(str(error)) from None
        return panel_of(state, server.text_of)


def _add_commands(server: ScriptServer) -> None:
    @server.command("stepscope.profile")
    def profile(uri: str) -> None:
        state = _state(server, uri)
        if server.text_of(state.script) != server.saved_text(state.script):
            server.warn(f"{state.script.name} has unsaved edits: save it first")
        server.jobs.profile(state, server.work_of(state))

    @server.command("stepscope.stop")
    def stop(uri: str) -> bool:
        return server.jobs.stop(_state(server, uri))

    @server.command("stepscope.profileOnSave")
    def profile_on_save(uri: str, wanted: bool) -> None:
        _state(server, uri).profile_on_save = wanted

    @server.command("stepscope.openReport")
    async def open_report(uri: str) -> str | None:
        state = _state(server, uri)
        try:
            return await server.jobs.report(state)
        except StepscopeError as error:
            server.warn(str(error))
            return None

    @server.command("stepscope.setBatch")
    async def set_batch(uri: str, wanted: Any) -> dict[str, Any] | None:
        state = _state(server, uri)
        try:
            return await _set_batch(server, state, wanted)
        except StepscopeError as error:
            server.warn(str(error))
            return None


async def _set_batch(server: ScriptServer, state: ScriptState, wanted: Any) -> dict[str, Any]:
    """Change the number in the source, through the editor."""
    text = server.text_of(state.script)
    if state.measured is None or text is None:
        raise StepscopeError(f"{state.script.name} was not measured yet: profile it first")
    place = batch_now(state.measured.costs, state.script, text)
    if place is None:
        raise StepscopeError(_no_number(state.script, state.measured))
    batch = _wanted_batch(state.measured.curve, wanted)
    edits = _number_edits(server, text, place, batch)
    workspace_edit = server.edits().of_edits({state.script: edits})
    params = types.ApplyWorkspaceEditParams(workspace_edit, label=f"batch size {batch}")
    result = await server.workspace_apply_edit_async(params)
    return {"batch": batch, "applied": result.applied}


def _no_number(script: Path, measured: MeasuredRun) -> str:
    place = measured.batch_elsewhere
    there = f"; {place.name} in line {place.line} of {place.file} does" if place is not None else ""
    return f"{script.name} has no number that sets the batch size{there}"


def _wanted_batch(curve: tuple[BatchPoint, ...], wanted: Any) -> int:
    batch = _field(wanted, "batch")
    if batch is not None:
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise StepscopeError(f"a batch has at least one sample, not {batch!r}")
        return batch
    samples, peak = _field(wanted, "samplesPerSecond"), _field(wanted, "peakBytes")
    amount = samples if samples is not None else peak
    if isinstance(amount, bool) or not isinstance(amount, int | float):
        raise StepscopeError("setBatch takes batch, samplesPerSecond or peakBytes")
    if not curve:
        raise StepscopeError("other batch sizes could not be predicted from the last run")
    if samples is not None:
        return batch_for(curve, samples_per_second=float(samples)).batch
    return batch_for(curve, peak_bytes=int(peak)).batch


def _number_edits(
    server: ScriptServer, text: str, place: BatchPlace, number: int
) -> list[types.TextEdit]:
    """Wherever the number stands."""
    units = server.workspace.position_codec.client_num_units
    edits = []
    for line, column, end in [(place.line, place.column, place.end_column), *place.also]:
        content = text_lines(text)[line - 1]
        start = types.Position(line - 1, units(content[:column]))
        stop = types.Position(line - 1, units(content[:end]))
        edits.append(types.TextEdit(types.Range(start, stop), str(number)))
    return edits


def _state(server: ScriptServer, uri: Any) -> ScriptState:
    path = path_of(uri) if isinstance(uri, str) else None
    if path is None:
        raise StepscopeError(f"{uri!r} is no file on this machine")
    return server.state_of(path)


def _field(value: Any, name: str) -> Any:
    """Of a JSON object, which may come as a dict or as attributes."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _lines(place: types.Range) -> tuple[int, int]:
    """First and last (from 0); a range that ends before a line's first character leaves it out."""
    end = place.end
    ends_before = end.character == 0 and end.line > place.start.line
    return place.start.line, end.line - 1 if ends_before else end.line


def _is_of(kind: Any, wanted: Any) -> bool:
    """Kinds are a tree by their dots."""
    return any(f"{kind}.".startswith(f"{getattr(one, 'value', one)}.") for one in wanted)
