"""Run training commands for a client whose user allowed it: each a stepscope of its own."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import NamedTuple

import anyio
from anyio.abc import Process

from stepscope.errors import UsageError
from stepscope.ui.jobs.environment import own_python
from stepscope.ui.jobs.process import kill_group
from stepscope.ui.mcp.ask_worker import Report
from stepscope.ui.mcp.folders import AllowedFolders
from stepscope.ui.mcp.pages import clean_text, count_tokens, to_json
from stepscope.ui.mcp.tools import RunQuestion, TuneQuestion
from stepscope.ui.say import SAYS

_HEARTBEAT_S = 5.0
_GRACE_S = 25.0  # a command that is cancelled closes its run folder first
_LAST_LINES, _LAST_TOKENS, _LAST_BYTES = 8, 400, 4096


class EndedCommand(NamedTuple):
    """How a command ended, where its run is, and the last lines that it printed."""

    code: int
    folder: str
    printed: list[str]


async def run_training(
    question: RunQuestion, folders: AllowedFolders, report: Report
) -> EndedCommand:
    changes = ("--with", ",".join(question.changes)) if question.changes else ()
    words = ("run", "--quiet", "--no-explain", *changes)
    return await _run(words, question, folders, report)


async def tune_training(
    question: TuneQuestion, folders: AllowedFolders, report: Report
) -> EndedCommand:
    only = ("--only", ",".join(question.only)) if question.only else ()
    words = ("tune", "--quiet", "--budget", question.budget, *only)
    return await _run(words, question, folders, report)


async def _run(
    words: Sequence[str],
    question: RunQuestion | TuneQuestion,
    folders: AllowedFolders,
    report: Report,
) -> EndedCommand:
    """Raise UsageError where the command could not begin."""
    command, where = question.command, folders.roots[0]
    if not command:
        raise UsageError("name the command, word by word, such as python train.py")
    if question.working_folder:
        where = folders.resolve(question.working_folder)
    if not where.is_dir():
        raise UsageError(f"{folders.shown(where)} is no folder to run a command in")
    out = _new_folder(where, words[0])
    whole = own_python("stepscope", *words, "--out", str(out), "--", *command)
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        # Its output must not reach the protocol on our own stdout.
        process = await anyio.open_process(
            whole, stdin=DEVNULL, stdout=output, stderr=STDOUT, cwd=where, start_new_session=True
        )
        try:
            while process.returncode is None:
                with anyio.move_on_after(_HEARTBEAT_S):
                    await process.wait()
                await report(time.monotonic() - began, f"{words[0]}: the command runs")
        except BaseException:
            with anyio.CancelScope(shield=True):
                await _end(process)
            raise
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - _LAST_BYTES))
        text = output.read().decode("utf-8", "replace")
    printed = [clean_text(line) for line in text.splitlines() if line.strip()][-_LAST_LINES:]
    while count_tokens(to_json(printed)) > _LAST_TOKENS:
        del printed[0]
    if process.returncode and not (out / f"{words[0]}.json").exists():
        said = "; ".join(line.removeprefix(SAYS).strip() for line in printed[-2:])
        raise UsageError(said or f"the {words[0]} did not begin")
    return EndedCommand(process.returncode or 0, folders.shown(out), printed)


def _new_folder(where: Path, verb: str) -> Path:
    """Return a name for the run that nobody uses."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    number, out = 1, where / "stepscope-runs" / f"{stamp}-{verb}"
    while out.exists():
        number += 1
        out = out.with_name(f"{stamp}-{verb}-{number}")
    return out


async def _end(process: Process) -> None:
    """Let stepscope end the command and close its run, then leave nothing running."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        with anyio.move_on_after(_GRACE_S):
            await process.wait()
    kill_group(process.pid)
    sys.stderr.write("stepscope mcp: a command was cancelled\n")
