"""Hold the server's state: open files, the scripts they belong to, and what clients are told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from lsprotocol import types
from pygls.lsp.server import LanguageServer
from pygls.uris import to_fs_path

from stepscope import __version__
from stepscope.errors import UnreadableInputError
from stepscope.records.source_lines import LineCosts
from stepscope.text.figures import milliseconds
from stepscope.text.words import counted
from stepscope.trace.files import read_whole
from stepscope.ui.lsp.annotations import diagnostics
from stepscope.ui.lsp.script_jobs import SAVE_DELAY_S, ScriptJobs, ScriptWork, WorkRoom
from stepscope.ui.lsp.script_state import (
    EditorSettings,
    LiveStep,
    OpenFile,
    ScriptState,
    WorkspaceEdits,
    is_same_program,
    program_key,
)

if TYPE_CHECKING:
    from pygls.progress import Progress


_THREADS = 32  # that wait for children
_DIAGNOSTICS_DELAY_S = 0.2


class ScriptServer(LanguageServer):
    """One process, one editor. Everything but waiting for children happens on its loop."""

    def __init__(self, room: WorkRoom | None = None) -> None:
        super().__init__(
            "stepscope", __version__, text_document_sync_kind=types.TextDocumentSyncKind.Full
        )
        self.settings = EditorSettings()
        self.is_told_to_leave = False
        self.first_settings: Any = None  # what the editor sent with `initialize`
        self.jobs = ScriptJobs(room or WorkRoom(), self.tell_changed, self.tell_live)
        self._states: dict[Path, ScriptState] = {}
        self._open: dict[Path, str] = {}  # the address of each open file
        self._on_disk: dict[Path, tuple[object, str | None]] = {}
        self._told: dict[Path, str | None] = {}  # the last error, by script
        self._bars = ProgressBars(self.work_done_progress)
        self._later: asyncio.TimerHandle | None = None

    def prepare_loop(self) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))

    def shutdown(self) -> None:
        """The thread that reads the input may wait for ever: do not wait for it."""
        if self._stop_event is not None:
            self._stop_event.set()
        if self._thread_pool is not None:
            self._thread_pool.shutdown(wait=False)
        if self._server is not None:
            self._server.close()

    # Files.

    def opened(self, uri: str) -> OpenFile | None:
        path = path_of(uri)
        if path is None:
            return None
        self._open[path] = uri
        self.jobs.look_for_runs(self.state_of(path), self.roots())
        return self.file(uri)

    def closed(self, uri: str) -> None:
        path = path_of(uri)
        if path is not None:
            self._open.pop(path, None)
            self.text_document_publish_diagnostics(
                types.PublishDiagnosticsParams(uri=uri, diagnostics=[])
            )

    def file(self, uri: str) -> OpenFile | None:
        """Return the file as it is now; None for what is no file, or cannot be read."""
        path = path_of(uri)
        if path is None:
            return None
        units = self.workspace.position_codec.client_num_units
        if path in self._open:
            document = self.workspace.get_text_document(self._open[path])
            return OpenFile(path, uri, document.source, document.version, units)
        text = self.text_of(path)
        return None if text is None else OpenFile(path, uri, text, None, units)

    def text_of(self, path: Path) -> str | None:
        """Return the text in the editor, else on the disk."""
        if path in self._open:
            return self.workspace.get_text_document(self._open[path]).source
        return self.saved_text(path)

    def saved_text(self, path: Path) -> str | None:
        """Return the text on the disk, which is what a profile runs."""
        try:
            stat = path.stat()
        except OSError:
            return None
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if self._on_disk.get(path, (None,))[0] != stamp:
            self._on_disk[path] = (stamp, _read(path))
        return self._on_disk[path][1]

    def roots(self) -> list[Path]:
        """Return the roots of the workspace."""
        uris = [*self.workspace.folders, self.workspace.root_uri]
        return list(dict.fromkeys(path for uri in uris if uri and (path := path_of(uri))))

    def edits(self) -> WorkspaceEdits:
        files = {path: file for path, uri in self._open.items() if (file := self.file(uri))}
        workspace = self.client_capabilities.workspace
        changes = workspace.workspace_edit if workspace is not None else None
        return WorkspaceEdits(
            open_files=files,
            text_of=self.text_of,
            units=self.workspace.position_codec.client_num_units,
            versioned=bool(changes is not None and changes.document_changes),
        )

    # Scripts.

    def state_of(self, path: Path) -> ScriptState:
        """Return the state of the script, or of one that was measured with this file in it."""
        own = self._states.get(path)
        if own is not None and own.measured is not None:
            return own
        others = (state for state in self._states.values() if state.covers(path))
        other = next((state for state in others if state.script != path), None)
        if other is not None and other.measured is not None:
            return other
        return self._states.setdefault(path, ScriptState(script=path))

    def work_of(self, state: ScriptState) -> ScriptWork:
        arguments = self.settings.arguments_of(state.script, self.roots())
        return ScriptWork(script=state.script, arguments=arguments, settings=self.settings)

    def edited(self, path: Path) -> None:
        """Say which values are stale, and ask for an estimate of the new text."""
        state = self.state_of(path)
        # Typing must not send them for every letter.
        if self._later is None:
            loop = asyncio.get_running_loop()
            self._later = loop.call_later(_DIAGNOSTICS_DELAY_S, self._publish_all)
        if state.measured is None or not self.settings.estimate:
            return
        state.estimate_failed = None
        known = [state.measured.costs, *([state.estimate] if state.estimate else [])]
        if any(is_same_program(costs, self.text_of) for costs in known):
            self.jobs.forget_estimate(state)
            return
        texts = self._texts_of(state.measured.costs)
        if all(program_key(text) is not None for text in texts.values()):
            self.jobs.estimate(state, self.work_of(state), texts)

    def _texts_of(self, costs: LineCosts) -> dict[Path, str]:
        """Return all files of a script as they are now, without those that are gone."""
        texts = {Path(file): self.text_of(Path(file)) for file in costs.texts}
        return {file: text for file, text in texts.items() if text is not None}

    def saved(self, path: Path) -> None:
        state = self.state_of(path)
        chosen = state.profile_on_save
        if self.settings.profile_on_save if chosen is None else chosen:
            self.jobs.profile(state, self.work_of(state), SAVE_DELAY_S)
        else:
            self.jobs.look_for_runs(state, self.roots())
            self.edited(path)

    def update_settings(self, values: Any) -> None:
        self.settings, wrong = self.settings.updated(values)
        for words in wrong:
            self.warn(words)
        self._refresh()

    # What clients are told.

    def tell_changed(self, state: ScriptState) -> None:
        """Something new can be shown of this script."""
        self._publish(self._files_of(state))
        for file in self._files_of(state):
            self.protocol.notify("stepscope/changed", {"uri": file.uri})
        if state.error is not None and self._told.get(state.script) != state.error:
            self.warn(f"{state.script.name}: {state.error}")
        self._told[state.script] = state.error
        self._refresh()

    def tell_live(self, state: ScriptState) -> None:
        """Tell how far a profile is, or that it has ended."""
        live = state.live
        step_ms = live.step_ms if live is not None else None
        batch = state.measured.batch if state.measured is not None else None
        for file in self._files_of(state):
            self.protocol.notify(
                "stepscope/live",
                {
                    "uri": file.uri,
                    "running": state.running_since is not None,
                    "step": live.step if live is not None else None,
                    "stepMs": step_ms,
                    "samplesPerSecond": batch / step_ms * 1e3 if batch and step_ms else None,
                    "message": live.message if live is not None else state.error or "",
                },
            )
        window = self.client_capabilities.window
        if window is not None and window.work_done_progress:
            self._bars.update(state)

    def cancelled(self, token: str | int) -> None:
        """The user closed a progress bar."""
        script = self._bars.script_of(token)
        if script is not None:
            self.jobs.stop(self.state_of(script))

    def warn(self, words: str) -> None:
        message = types.ShowMessageParams(types.MessageType.Warning, f"stepscope: {words}")
        self.window_show_message(message)

    def _files_of(self, state: ScriptState) -> list[OpenFile]:
        files = [self.file(uri) for path, uri in self._open.items() if state.covers(path)]
        return [file for file in files if file is not None]

    def _publish_all(self) -> None:
        self._later = None
        self._publish(filter(None, map(self.file, self._open.values())))

    def _publish(self, files: Iterable[OpenFile]) -> None:
        for file in files:
            marks = diagnostics(file, self.state_of(file.path), self.text_of)
            self.text_document_publish_diagnostics(
                types.PublishDiagnosticsParams(
                    uri=file.uri, diagnostics=marks, version=file.version
                )
            )

    def _refresh(self) -> None:
        """Editors that can be asked to draw hints and lenses again."""
        workspace = self.client_capabilities.workspace
        if workspace is None:
            return
        if workspace.inlay_hint is not None and workspace.inlay_hint.refresh_support:
            self.workspace_inlay_hint_refresh(None)
        if workspace.code_lens is not None and workspace.code_lens.refresh_support:
            self.workspace_code_lens_refresh(None)


def path_of(uri: str) -> Path | None:
    """Return None for what is no file on this machine, such as an unsaved buffer."""
    if not uri.startswith("file:"):
        return None
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        name = to_fs_path(uri)
        return Path(name).resolve() if name else None
    return None


def _read(path: Path) -> str | None:
    try:
        return read_whole(path).decode("utf-8-sig")
    except (UnreadableInputError, UnicodeDecodeError):
        return None


# A profile's progress in the editor's own bar, which may also cancel it.


class ProgressBars:
    """One a script that is being measured."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._asked: dict[Path, str] = {}  # token
        self._begun: set[str] = set()

    def update(self, state: ScriptState) -> None:
        """Begin, move or end the script's bar."""
        token = self._asked.get(state.script)
        if state.running_since is None:
            if token is not None:
                del self._asked[state.script]
                if token in self._begun:
                    self._begun.discard(token)
                    self._progress.end(token, types.WorkDoneProgressEnd())
        elif token is None:
            self._ask(state)
        elif token in self._begun and state.live is not None:
            report = types.WorkDoneProgressReport(message=_words(state.live))
            self._progress.report(token, report)

    def script_of(self, token: str | int) -> Path | None:
        """Whose bar it is."""
        return next((script for script, one in self._asked.items() if one == token), None)

    def _ask(self, state: ScriptState) -> None:
        token = uuid4().hex
        self._asked[state.script] = token

        def begin(_: object = None) -> None:
            if self._asked.get(state.script) != token:  # it has ended meanwhile
                return
            self._begun.add(token)
            title = f"measuring {state.script.name}"
            self._progress.begin(token, types.WorkDoneProgressBegin(title, cancellable=True))

        self._progress.create(token, begin)


def _words(live: LiveStep) -> str:
    if not live.step:
        return live.message
    step = f", {milliseconds(live.step_ms)} each" if live.step_ms is not None else ""
    return f"{counted(live.step, 'step')}{step}"
