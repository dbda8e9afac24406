"""A profile's progress in the editor's own bar, which may also cancel it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

from lsprotocol import types

from stepscope.records.figures import milliseconds
from stepscope.records.words import counted

if TYPE_CHECKING:
    from pathlib import Path

    from pygls.progress import Progress

    from stepscope.ui.lsp.script_state import LiveStep, ScriptState


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
                self._end(state.script, token)
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

    def _end(self, script: Path, token: str) -> None:
        del self._asked[script]
        if token in self._begun:
            self._begun.discard(token)
            self._progress.end(token, types.WorkDoneProgressEnd())


def _words(live: LiveStep) -> str:
    if not live.step:
        return live.message
    step = f", {milliseconds(live.step_ms)} each" if live.step_ms is not None else ""
    return f"{counted(live.step, 'step')}{step}"
