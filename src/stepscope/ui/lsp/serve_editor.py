"""Serve an editor on standard input and output, or on a port of this machine: answer each
request from the state of its script.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NoReturn

from lsprotocol import types
from pygls.exceptions import JsonRpcInvalidParams
from pygls.uris import from_fs_path

from stepscope.errors import StepscopeError, UsageError
from stepscope.records.source_lines import BatchPlace, BatchPoint, LineCost, LineCosts
from stepscope.ui.editor.batch_size import batch_for, batch_now
from stepscope.ui.editor.edits import text_lines
from stepscope.ui.lsp import annotations as shown_types
from stepscope.ui.lsp.measured_run import MeasuredRun
from stepscope.ui.lsp.script_jobs import WorkRoom
from stepscope.ui.lsp.script_server import ScriptServer, path_of
from stepscope.ui.lsp.script_state import (
    ScriptState,
    TextOf,
    choose_costs,
    followed_lines,
    qualified_name,
)
from stepscope.ui.say import say

_LOCAL = "127.0.0.1"


def serve_stdio(room: WorkRoom | None = None) -> NoReturn:
    """The protocol gets descriptors of its own: whatever else is printed goes to stderr."""
    _prepare()
    source, target = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    make_server(room).start_io(os.fdopen(source, "rb"), os.fdopen(target, "wb"))
    _leave()


def serve_tcp(port: int) -> NoReturn:
    """Serve one editor, then end."""
    _prepare()
    try:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((_LOCAL, port))
    except OSError as error:
        raise UsageError(f"port {port} cannot be used: {error.strerror}; choose another") from None
    say(f"listening on {_LOCAL}:{port}")
    make_server().start_tcp(_LOCAL, port)
    _leave()


def _prepare() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_without_traceback)
    logging.basicConfig(handlers=[handler], level=logging.ERROR)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _without_traceback(record: logging.LogRecord) -> bool:
    """Drop the traceback of a request that makes no sense: nothing of ours is wrong."""
    if record.exc_info and isinstance(record.exc_info[1], JsonRpcInvalidParams):
        record.exc_info = None
    return True


def _leave() -> NoReturn:
    """The editor is gone. A thread may still wait for input: do not wait for it."""
    sys.stderr.flush()
    os._exit(0)


# What the server answers: each request in a few lines, from the state of its script.

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
        other = state.measured.batch_elsewhere
        there = f"; {other.name} in line {other.line} of {other.file} does" if other else ""
        raise StepscopeError(f"{state.script.name} has no number that sets the batch size{there}")
    batch = _wanted_batch(state.measured.curve, wanted)
    edits = _number_edits(server, text, place, batch)
    workspace_edit = server.edits().of_edits({state.script: edits})
    params = types.ApplyWorkspaceEditParams(workspace_edit, label=f"batch size {batch}")
    result = await server.workspace_apply_edit_async(params)
    return {"batch": batch, "applied": result.applied}


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
    """Return a field of a JSON object, which may come as a dict or as attributes."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _lines(place: types.Range) -> tuple[int, int]:
    """First and last (from 0); a range that ends before a line's first character leaves it out."""
    end = place.end
    ends_before = end.character == 0 and end.line > place.start.line
    return place.start.line, end.line - 1 if ends_before else end.line


def _is_of(kind: Any, wanted: Any) -> bool:
    """Kinds are a tree by their dots."""
    return any(f"{kind}.".startswith(f"{getattr(one, 'value', one)}.") for one in wanted)


# The answer to `stepscope/panel`: what a side panel draws of one script.

_MOST_OPERATORS = 8
_MOST_CODE = 60  # characters of a line
_KEPT_IN = "activations"  # the category that lines keep bytes in
_ELSEWHERE = "not in your lines"

Block = dict[str, Any]


def panel_of(state: ScriptState, text_of: TextOf) -> dict[str, Any]:
    """Names and units are those of docs/reference/cli/lsp.md; None means not known."""
    shown = choose_costs(state, text_of)
    measured = state.measured
    costs = shown.costs if shown is not None else None
    is_estimate = costs is not None and costs.kind == "estimated"
    interval = measured is not None and not is_estimate
    batch = _batch(state, text_of)
    peak = costs.peak_bytes if costs is not None else None
    if peak is None and costs is not None and measured is not None and not is_estimate:
        peak = measured.peak_bytes
    elsewhere = measured.batch_elsewhere if measured is not None and batch is None else None
    return {
        "state": shown.trust if shown is not None else "none",
        "verdict": costs.verdict if costs is not None else None,
        "stepMs": costs.step_ms if costs is not None else None,
        "lowMs": measured.low_ms if interval and measured else None,
        "highMs": measured.high_ms if interval and measured else None,
        "samplesPerSecond": _throughput(measured, costs, batch),
        "peakBytes": peak,
        "capacityBytes": measured.capacity_bytes if measured is not None else None,
        "batch": batch,
        "batchElsewhere": elsewhere  # where it was when the run was read
        and {
            "uri": from_fs_path(elsewhere.file),
            "line": elsewhere.line - 1,
            "name": elsewhere.name,
            "value": elsewhere.value,
        },
        "time": _time_blocks(state, costs, text_of) if costs is not None else [],
        "memory": _memory_blocks(state, costs, text_of) if costs is not None else [],
        "gpus": [
            {
                "gpu": row.gpu,
                "stepMs": row.step_ms,
                "lowMs": row.low_ms,
                "highMs": row.high_ms,
                "fits": row.fits,
                "decides": row.decides,
            }
            for row in (measured.gpus if measured is not None else ())
            if row.step_ms is not None
        ],
        "report": measured.report if measured is not None else None,
        "runningSince": state.running_since,
        "error": state.error or state.estimate_failed,
    }


def _throughput(
    measured: MeasuredRun | None, costs: LineCosts | None, batch: Block | None
) -> float | None:
    """Return samples per second; of an edited script only if its batch is known."""
    if measured is None or measured.batch is None or costs is None or costs.step_ms <= 0:
        return None
    samples = float(measured.batch)
    if costs.kind == "estimated":
        if batch is None or measured.batch_number is None:
            return None
        samples *= batch["value"] / measured.batch_number
    return samples / costs.step_ms * 1e3


def _batch(state: ScriptState, text_of: TextOf) -> dict[str, Any] | None:
    """Return the batch; None while its number cannot be found in the script as it is now."""
    text = text_of(state.script)
    measured = state.measured
    if text is None or measured is None:
        return None
    place = batch_now(measured.costs, state.script, text)
    if place is None:
        return None
    points = [
        {
            "batch": point.batch,
            "stepMs": point.step_ms,
            "lowMs": point.low_ms,
            "highMs": point.high_ms,
            "samplesPerSecond": point.samples_per_second,
            "peakBytes": point.peak_bytes,
            "peakLowBytes": point.peak_low_bytes,
            "peakHighBytes": point.peak_high_bytes,
        }
        for point in measured.curve
    ]
    return {"value": place.value, "line": place.line - 1, "points": points}


def _time_blocks(state: ScriptState, costs: LineCosts, text_of: TextOf) -> list[Block]:
    """Divide by function, line and operator; the rest of the step is a block of its own."""
    step_ms = costs.step_ms or 1.0
    functions: dict[tuple[str, str], list[LineCost]] = defaultdict(list)
    for line in costs.lines:
        full = qualified_name(costs.texts.get(line.file, ""), line.line)
        functions[line.file, full or line.function].append(line)
    blocks = []
    for (file, function), lines in functions.items():
        children = [
            _line_block(line, costs, _now(state, costs, line, text_of), step_ms) for line in lines
        ]
        ms = sum(line.total_ms for line in lines)
        blocks.append(
            _block(
                function if function and function != "<module>" else Path(file).name,
                "ms",
                ms,
                ms / step_ms,
                _first_place(children),
                children,
            )
        )
    blocks.sort(key=lambda block: -block["ms"])
    if costs.other_ms > 0:
        share = costs.other_ms / step_ms
        blocks.append(_block(_ELSEWHERE, "ms", costs.other_ms, share, None, []))
    return blocks


def _line_block(line: LineCost, costs: LineCosts, now: int | None, step_ms: float) -> Block:
    children = [
        _block(one.name, "ms", one.ms, one.ms / step_ms, None, [])
        for one in line.operators[:_MOST_OPERATORS]
    ]
    place = (line.file, now) if now is not None else None
    name, ms = _line_name(line, costs, now), line.total_ms
    return _block(name, "ms", ms, ms / step_ms, place, children)


def _line_name(line: LineCost, costs: LineCosts, now: int | None) -> str:
    """`12  x = self.conv(x)`: its number today, its code as it was measured."""
    lines = text_lines(costs.texts.get(line.file, ""))
    code = " ".join(lines[line.line - 1].split()) if line.line <= len(lines) else ""
    short = code if len(code) <= _MOST_CODE else f"{code[: _MOST_CODE - 1]}…"
    return f"{now or line.line}  {short}".rstrip()


def _memory_blocks(state: ScriptState, costs: LineCosts, text_of: TextOf) -> list[Block]:
    """Return the peak by category; what is kept for backward, by line."""
    measured = state.measured
    if measured is None or not measured.peak_bytes:
        return []
    peak = measured.peak_bytes
    lines = [line for line in costs.lines if line.kept_bytes]
    kept = []
    for line in sorted(lines, key=lambda one: -(one.kept_bytes or 0)):
        now = _now(state, costs, line, text_of)
        place = (line.file, now) if now is not None else None
        size = line.kept_bytes or 0
        name = _line_name(line, costs, now)
        kept.append(_block(name, "bytes", size, size / peak, place, []))
    return [
        _block(name, "bytes", size, size / peak, None, kept if name == _KEPT_IN else [])
        for name, size in measured.memory.items()
        if size
    ]


def _now(state: ScriptState, costs: LineCosts, line: LineCost, text_of: TextOf) -> int | None:
    """Return the line's number today (from 1)."""
    file = Path(line.file)
    text = text_of(file)
    followed = followed_lines(state, costs, file, text) if text is not None else None
    if followed is None:
        return None
    return next((one.line for one in followed.lines if one.cost is line), None)


def _first_place(children: list[Block]) -> tuple[str, int] | None:
    places = [(child["line"], child["uri"]) for child in children if child["line"] is not None]
    return None if not places else (min(places)[1], min(places)[0] + 1)


def _block(
    name: str,
    unit: str,
    amount: float,
    share: float,
    place: tuple[str, int] | None,
    children: list[Block],
) -> Block:
    """`place` is a file or its address, and a line (from 1)."""
    uri = None
    if place is not None:
        uri = place[0] if "://" in place[0] else from_fs_path(place[0])
    return {
        "name": name,
        unit: amount,
        "share": share,
        "uri": uri,
        "line": place[1] - 1 if place is not None else None,
        "children": children,
    }
