"""Run a command with capture, alone, as one of several `stepscope run`s that share a job, or
to its end for `ab`, `tune` and `bench`.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import NotCapturedError, StepscopeError, UsageError
from stepscope.measure import folder as layout
from stepscope.measure.folder import KeptJson
from stepscope.measure.settings import Settings
from stepscope.records.folders import HOSTS, process_state
from stepscope.records.run import HostRun
from stepscope.text.words import counted
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.files import MissingFileError, read_whole
from stepscope.trace.run_folder.run_state import (
    absent_places,
    last_attempt,
    read_host_run,
    read_host_runs,
)
from stepscope.ui.jobs.job_key import JobKey, folder_name
from stepscope.ui.jobs.process import (
    OUTPUT,
    CommandEnd,
    HeldSignals,
    News,
    last_lines,
    run_job,
    run_to_end,
)
from stepscope.ui.jobs.run_folder import (
    IN_USE,
    CommandRecord,
    RunFile,
    begin_record,
    describe_end,
    describe_ranks,
    read_record,
    script_of,
    shortened,
)
from stepscope.ui.say import say


def capture(
    command: tuple[str, ...],
    folder: Path,
    settings: Settings,
    *,
    output: int | None = None,
    until: Callable[[], bool] | None = None,
) -> tuple[int, list[dict[str, Any]]]:
    """Capture for verbs that need it: UsageError if the run folder cannot be written."""
    try:
        run = RunFile.begin(folder, command, settings)
    except OSError as error:
        raise UsageError(f"the run folder cannot be written: {error}") from None
    return capture_into(run, command, output=output, until=until)


def capture_into(
    run: RunFile | JobPart,
    command: tuple[str, ...],
    *,
    output: int | None = None,
    until: Callable[[], bool] | None = None,
    news: News | None = None,
    signals: HeldSignals | None = None,
) -> tuple[int, list[dict[str, Any]]]:
    """Return the command's exit code and what each rank left; run.json holds both.

    Once `until` returns True, the command is ended, which is no failure. `news` is asked while the
    command runs.
    """
    job = partial(run_job, command, run.settings, output=output, until=until)
    try:
        code = job(news=news, record=run, signals=signals)
    except UsageError:  # it could not be started
        run.discard()
        raise
    try:
        return code, run.close(code)
    except Exception as error:  # the command's exit code is not ours to change
        say(f"the run folder could not be closed: {type(error).__name__}: {error}")
        return code, []


# One `stepscope run` of several that share a job and its run folder.
#
# Whoever comes first writes run.json. Everyone writes a file of its own, hosts/00001.json, and
# nobody waits for another before the command starts. When the command has ended, the first host
# (or, where places are not known, the one that came first) waits a few seconds for the others,
# closes run.json and explains the run. On a disk that is not shared, every host closes its own
# part.

LONGEST_WAIT_S = 10.0  # for other hosts, once the command has ended here
_POLL_S = 0.25
_UNWRITTEN_S = 2.0  # that a new run.json may take to show its content
_OLD_S = 120.0  # since a run was closed: later ones are no part of it
_NAMED_PARTS = 16  # a part of more says nothing when all is well
_MOST_CANDIDATES = 1000
_MOST_BYTES = 64 << 20


@dataclass(slots=True)
class JobPart(CommandRecord):
    """From before the command starts until the run is closed."""

    key: JobKey
    opened: bool  # this part came first

    @classmethod
    def begin(
        cls, folder: Path, command: Sequence[str], settings: Settings, key: JobKey
    ) -> JobPart:
        """OSError if the folder cannot be written; UsageError if it belongs to another job.

        PartTakenError if it holds this part already.
        """
        record = begin_record(command, settings)
        facts = {
            "job": key.name,
            "meeting": key.meeting,
            "places": key.places,
            "allocation": key.allocation,
        }
        opened = _write_first(folder, {**record, "job": facts})
        own = {**msgspec.to_builtins(key), "job": key.name, "host": record["process"]["host"]}
        del own["name"], own["one_terminal"]
        record |= own
        try:
            file = _register(folder, key, record)
        except UsageError:
            if opened:
                layout.remove(folder / layout.RUN)
            raise
        part = cls(folder, settings, record, file, key, opened)
        if key.attempt and part.closes and not opened:
            part._open_again()
        return part

    @property
    def closes(self) -> bool:
        """Return whether this part waits for the others, closes the run and explains it."""
        return self.opened if self.key.place is None else self.key.place == 0

    def _open_again(self) -> None:
        """run.json is closed by an earlier attempt, and the job runs once more."""
        before = read_record(self.folder / layout.RUN) or {}
        ended = ("exit_code", "ended_unix", "ranks")
        begun = {name: value for name, value in before.items() if name not in ended}
        begun |= {"status": "running", "process": self.record["process"]}
        self._write_whole(iter([begun]))

    def discard(self) -> None:
        """The command could not be started; the other parts stay."""
        layout.remove(self._file.path)
        with contextlib.suppress(OSError):
            self._file.path.parent.rmdir()
            layout.remove(self.folder / layout.RUN)
            self.folder.rmdir()

    def close(self, code: int) -> list[dict[str, Any]]:
        """The command has ended here. Nobody is waited for."""
        self.record |= {"status": "finished", "exit_code": code, "ended_unix": time.time()}
        self.write_end(self.record)
        return []

    def close_job(self) -> list[dict[str, Any]]:
        """Wait for the other parts, close run.json and return what each rank left."""
        if self.closes:
            self._wait()
        elif not self.opened or self._first_is_here():
            return []
        layout.remove_leftovers(self.folder)
        code = self.record["exit_code"]
        ranks = describe_ranks(self.folder, self.settings, code)
        runs = read_host_runs(self.folder)
        begun = read_record(self.folder / layout.RUN) or self.record
        whole = {**begun, "signals": self.record["signals"], **describe_end(code, ranks)}
        ended = [run.ended_unix for run in runs if run.ended_unix is not None]
        whole["ended_unix"] = max(ended, default=whole["ended_unix"])
        whole["hosts"] = [_summary(run) for run in runs[:1000]]
        self._write_whole(shortened(whole, ranks))
        return ranks

    def _write_whole(self, versions: Iterator[dict[str, Any]]) -> None:
        path, why = self.folder / layout.RUN, ""
        for version in versions:
            try:
                layout.write_json(path, version)
                return
            except OSError as error:
                why = layout.why_refused(error)
        say(f"{path} could not be written: {why}")

    def _wait(self) -> None:
        """Wait until every part has ended, or the time is up."""
        limit = time.monotonic() + LONGEST_WAIT_S
        while open_parts := self._open_parts():
            if time.monotonic() >= limit:
                say(
                    f"no longer waiting for {open_parts}: run `stepscope explain {self.folder}` "
                    "when it has arrived"
                )
                return
            time.sleep(_POLL_S)

    def _open_parts(self) -> str:
        """Names of parts that have not ended; empty if all have."""
        runs = last_attempt(read_host_runs(self.folder))
        running = [run.host for run in runs if not run.is_finished and not _is_gone(run)]
        absent = absent_places(runs)
        named = [*dict.fromkeys(running)][:4]
        named += [f"{counted(len(absent), 'part')} that never arrived"] if absent else []
        return ", ".join(named)

    def _first_is_here(self) -> bool:
        """Return whether the part that closes the run writes into this folder."""
        return any(run.place == 0 for run in read_host_runs(self.folder))

    def farewell(self) -> str | None:
        """Return what a part that does not explain says at its end."""
        if self.key.places is not None and self.key.places > _NAMED_PARTS:
            return None
        if self._first_is_here() or self.key.place is None:
            if self.key.one_terminal:
                return None
            return f"this host's part of the run is in {self.folder}: the first host explains it"
        return (
            f"this host's part of the run is in {self.folder}. To explain the job, run `stepscope "
            "explain` with the folders of all hosts"
        )


class PartTakenError(UsageError):
    """The folder holds this very part of the job already."""


def candidate_folders(out: Path | None, command: Sequence[str], key: JobKey) -> Iterator[Path]:
    """`out` alone, or the names that every part of the job tries in the same order.

    One batch script may start the same training several times.
    """
    if out is not None:
        yield out
        return
    base = Path(layout.HOME) / folder_name(key, script_of(command))
    for number in range(1, _MOST_CANDIDATES):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if not folder.exists() or _why_not_ours(folder, key) is None:
            yield folder


def _write_first(folder: Path, record: dict[str, Any]) -> bool:
    """Write run.json if nobody has; True if this part came first."""
    folder.mkdir(parents=True, exist_ok=True)
    file = KeptJson(folder / layout.RUN)
    try:
        file.write(record, last=True)
    except FileExistsError:
        return False
    if any(not _is_runs_own(path.name) for path in folder.iterdir()):
        layout.remove(file.path)
        raise UsageError(f"{folder} {IN_USE}")
    return True


def _is_runs_own(name: str) -> bool:
    """Another part may have come meanwhile."""
    return name in (layout.RUN, HOSTS) or name.startswith((f".{layout.RUN}", "rank-"))


def _register(folder: Path, key: JobKey, record: dict[str, Any]) -> KeptJson:
    """This part's file; UsageError if the folder has such a part, or is another job's."""
    why = _why_not_ours(folder, key)
    if why is not None:
        raise UsageError(f"{folder} {why}")
    (folder / HOSTS).mkdir(exist_ok=True)
    for path in _own_files(folder, key, record["host"]):
        file = KeptJson(path)
        try:
            file.write(record)
        except FileExistsError:
            continue
        return file
    raise PartTakenError(f"{folder} {_taken(key)}")


def _own_files(folder: Path, key: JobKey, host: str) -> Iterator[Path]:
    """Names for this part's file. Several parts without a place may run on one host."""
    again = f".{key.attempt + 1}" if key.attempt else ""
    if key.place is not None:
        yield folder / HOSTS / f"{key.place:05d}{again}.json"
        return
    for number in range(1, _MOST_CANDIDATES):
        path = folder / HOSTS / f"{host}{f'-{number}' if number > 1 else ''}{again}.json"
        yield path
        before = read_host_run(path)
        if before is not None and (before.is_finished or _is_gone(before)):
            return


def _why_not_ours(folder: Path, key: JobKey) -> str | None:
    """Return why this part cannot write into the folder; None if it can."""
    run = _read_run(folder / layout.RUN)
    if run is None:
        return IN_USE if folder.exists() and any(folder.iterdir()) else None
    job = run.job
    theirs = None
    if job is not None:
        theirs = JobKey(name=job.job, meeting=job.meeting, allocation=job.allocation)
    if theirs is None or not key.is_job_of(theirs):
        whose = f"holds a run of {theirs.name}" if theirs else "holds a finished run"
        if theirs is None and run.status == "running":
            whose = "holds another run"
        return f"{whose}, not of {key.name}: a run folder is never overwritten"
    if key.attempt:
        return None
    if run.ended_unix is not None and time.time() - run.ended_unix > _OLD_S:
        return f"holds an earlier run of {key.name}: a run folder is never overwritten"
    return None


def _taken(key: JobKey) -> str:
    which = f"part {key.place} of" if key.place is not None else "this host's part of"
    return f"already holds {which} {key.name}: a run folder is never overwritten"


class _JobFacts(msgspec.Struct, frozen=True):
    job: str = ""
    meeting: str | None = None
    allocation: str | None = None


class _OpenedRun(msgspec.Struct, frozen=True):
    job: _JobFacts | None = None
    status: str = ""
    ended_unix: float | None = None


def _read_run(path: Path) -> _OpenedRun | None:
    """Return None if there is no run.json; one that is just being written is waited for."""
    limit = time.monotonic() + _UNWRITTEN_S
    while True:
        try:
            return decode(read_whole(path, _MOST_BYTES), _OpenedRun)
        except MissingFileError:
            return None
        except (StepscopeError, NotJsonError):
            if time.monotonic() >= limit:
                return _OpenedRun()
        time.sleep(_POLL_S / 5)


def _summary(run: HostRun) -> dict[str, Any]:
    names = ("place", "attempt", "host", "status", "exit_code", "started_unix", "ended_unix")
    return {name: getattr(run, name) for name in names}


def _is_gone(run: HostRun) -> bool:
    """Return whether it is known that it will not end any more."""
    return run.process is not None and process_state(run.process) in ("gone", "restarted")


# Runs one command of `ab` or `tune` to its end and captures it into a run folder.

NEVER = 1_000_000_000  # a step that no training reaches
_LAST_LINES = 5


def capture_run(command: Sequence[str], folder: Path, *, step_on: str, window: int | None) -> None:
    """Run it to its end into a new run folder; raises NotCapturedError if it failed or had no step.

    Only steps are captured; with `window`, also memory and a trace after that many steps.
    """
    settings = Settings(
        folder=str(folder.absolute()),
        wait=NEVER if window is None else window,
        memory=window is not None,
        sample_hz=0.0,
        step_on=step_on,
    )
    end, ranks = capture_to_end(command, folder, settings)
    code = end.code
    output = folder / OUTPUT
    if code:
        raise NotCapturedError(
            f"{shlex.join(command)} ended with exit code {code}: nothing was compared. "
            f"Its output is in {output}{_tail(folder)}"
        )
    if not ranks:
        raise NotCapturedError(
            f"{shlex.join(command)}: no training step was seen. If it trains without a torch "
            f"optimizer, try --step-on dataloader (or forward). Its output is in {output}"
        )


def capture_to_end(
    command: Sequence[str],
    folder: Path,
    settings: Settings,
    *,
    limit_s: float | None = None,
    enough: Callable[[], bool] | None = None,
) -> tuple[CommandEnd, list[dict[str, Any]]]:
    """Into a new run folder; also what each rank left. If stepscope is interrupted meanwhile, the
    folder is removed."""
    folder.mkdir(parents=True)
    record = begin_record(command, settings)
    try:
        end = run_to_end(command, settings, folder, limit_s=limit_s, enough=enough)
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(folder, ignore_errors=True)
        raise
    ranks = describe_ranks(folder, settings)
    if settings.wait == NEVER:
        for rank in ranks:
            rank["missing"] = {layout.TRACE: "only steps were captured"}
    layout.write_json(folder / layout.RUN, record | describe_end(end.code, ranks))
    return end, ranks


def _tail(folder: Path) -> str:
    return "".join(f"\n  {line}" for line in last_lines(folder, _LAST_LINES))
