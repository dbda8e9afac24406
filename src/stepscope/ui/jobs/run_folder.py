"""Claim the run folder for one run, describe it while it lasts, say whether capture found
the training, then close it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import stepscope
from stepscope.errors import StepscopeError, UnreadableInputError, UsageError
from stepscope.measure import folder as layout
from stepscope.measure.folder import KeptJson
from stepscope.measure.processes import BACKWARD, FORKED, STARTED, STEP, TORCH
from stepscope.measure.profiler.schedule import Schedule
from stepscope.records.folders import processes_files, this_process, unwritten_parts
from stepscope.records.quality import StepNumber
from stepscope.records.run import AppliedRemedy, RunRemedy, join_ranks
from stepscope.text.words import SITE, counted
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.files import LineFile, read_tail, read_whole
from stepscope.ui.say import say

if TYPE_CHECKING:
    from stepscope.measure.settings import Settings

_MOST_SIGNALS = 20
_MOST_BYTES = 256 << 20  # of run.json
_MODULE = re.compile(r"[A-Za-z_][\w.]*$")
IN_USE = "is not empty: a run folder is never overwritten"
_MOST_WORDS = 16
_MANY_RANKS = 64  # of more, run.json lists those that lack something


@dataclass(frozen=True, slots=True)
class ClaimedFolder:
    """A folder that belongs to one run."""

    path: Path
    made: bool  # by this run

    def give_back(self) -> None:
        """Remove the folder of a run that is not captured."""
        if self.made:
            with contextlib.suppress(OSError):
                self.path.rmdir()


def claim(out: Path | None, command: Sequence[str]) -> ClaimedFolder:
    """UsageError if `out` is in use; OSError if no folder can be made."""
    if out is None:
        return ClaimedFolder(layout.new_run_folder(script_of(command)), made=True)
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise UsageError(f"{out} {IN_USE}")
    return ClaimedFolder(out, made=made)


def claim_or_refuse(out: Path | None, command: Sequence[str]) -> Path:
    """Claim a folder for verbs that can do nothing without one: always a UsageError."""
    try:
        return claim(out, command).path
    except OSError as error:
        raise UsageError(
            f"no folder for the capture can be made: {error}; --out names another"
        ) from None


def script_of(command: Sequence[str]) -> str:
    """Return what the run is called: the script, else the module after -m, else the program."""
    for word in command:
        if word.endswith((".py", ".sh")):
            return word
    modules = [
        module for option, module in pairwise(command) if option == "-m" and _MODULE.match(module)
    ]
    if modules:
        return modules[-1]
    return "stdin" if "-" in command[1:2] else command[0]


@dataclass(slots=True)
class CommandRecord:
    """The file about one command: how it was started, what it was told, how it ended."""

    folder: Path
    settings: Settings
    record: dict[str, Any]
    _file: KeptJson

    def heard(self, number: int) -> None:
        """Record a signal for the command, in case nothing else gets written."""
        if len(self.record["signals"]) < _MOST_SIGNALS:
            self.record["signals"].append({"signal": _name(number), "unix": time.time()})
            self.write_again()

    def handed_over(self) -> None:
        """The command is about to replace this process: nobody will close the folder."""
        self.record["status"] = "handed over"
        self.write_again()

    def write_again(self) -> None:
        """Write the record as it is now."""
        with contextlib.suppress(OSError):
            self._file.write(self.record)

    def write_end(self, *versions: dict[str, Any]) -> None:
        """Write the first version that fits on the disk, for the last time."""
        try:
            self._file.write(*versions, last=True)
        except OSError as error:
            say(f"{self._file.path} could not be written: {layout.why_refused(error)}")


@dataclass(slots=True)
class RunFile(CommandRecord):
    """run.json of a run that is alone in its folder, from its start to its end."""

    @classmethod
    def begin(cls, folder: Path, command: Sequence[str], settings: Settings) -> RunFile:
        """OSError if it cannot be written; of several runs in one folder only one gets here."""
        record, file = begin_record(command, settings), KeptJson(folder / layout.RUN)
        run = cls(folder, settings, record, file)
        try:
            run._file.write(run.record)
        except FileExistsError:
            raise UsageError(f"{folder} {IN_USE}") from None
        return run

    @property
    def closes(self) -> bool:
        """It is alone."""
        return True

    def discard(self) -> None:
        """The command could not be started."""
        layout.remove(self._file.path)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def remove_empty(self) -> None:
        """Remove the folder of a command that trained nothing."""
        if any(self.folder.glob("rank-*")):
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()  # the folder of all runs, if this was the only one

    def close(self, code: int) -> list[dict[str, Any]]:
        """The command has ended: record and return what each rank left."""
        layout.remove_leftovers(self.folder)
        ranks = describe_ranks(self.folder, self.settings, code)
        self.record |= describe_end(code, ranks)
        self.write_end(*shortened(self.record, ranks))
        return ranks


def read_record(path: Path) -> dict[str, Any] | None:
    """Return a JSON object of a run folder; None if there is none, or no whole one."""
    with contextlib.suppress(StepscopeError, NotJsonError):
        return decode(read_whole(path, _MOST_BYTES), dict[str, Any])
    return None


def shortened(record: dict[str, Any], ranks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """run.json, and shorter versions of it for a full disk. Of many ranks it lists those that lack
    something: every rank has its own file."""
    record = {**record, "rank_count": len(ranks)}
    if len(ranks) <= _MANY_RANKS:
        yield record
    else:
        ranks = [rank for rank in ranks if rank["missing"]][:_MANY_RANKS]
    yield {**record, "ranks": [_core_facts(rank) for rank in ranks]}
    yield {**record, "ranks": [_core_facts(rank) for rank in ranks[:1]]}


def begin_record(command: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Return what is written about a command before it starts."""
    return {
        "schema": layout.SCHEMA,
        "stepscope": stepscope.__version__,
        "command": list(command),
        "folder": _working_folder(),
        "started_unix": time.time(),
        "status": "running",
        "process": asdict(this_process()),
        "signals": [],
        "window": {
            name: getattr(settings, name) for name in ("wait", "warmup", "active", "repeat")
        },
        "step_on": settings.step_on,
        "hang_after": settings.hang_after,
        "remedies": list(settings.remedies),
    }


def describe_end(code: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what run.json says once the command has ended."""
    return {
        "status": "finished",
        "exit_code": code,
        "ended_unix": time.time(),
        "ranks": ranks,
        "world_size": max((rank["world_size"] or 1 for rank in ranks), default=None),
    }


def _working_folder() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return str(number)


def applied_words(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Return what became of each remedy of `--with` in all ranks."""
    told = [
        [AppliedRemedy(**remedy) for remedy in rank["remedies"]]
        for rank in ranks
        if isinstance(rank.get("remedies"), list)
    ]
    return [f"with {remedy.words}{_did(remedy)}" for remedy in join_ranks((), told)]


def _did(remedy: RunRemedy) -> str:
    return f": {remedy.detail}" if remedy.outcome == "applied" else ""


def missing_words(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Return what ranks lack and why, a sentence each; of many ranks the first ones."""
    lacking = [
        f"rank {rank['rank']}: no {name}: {why}"
        for rank in ranks
        for name, why in rank["missing"].items()
    ]
    if len(lacking) <= _MOST_WORDS:
        return lacking
    return [*lacking[:_MOST_WORDS], f"and {len(lacking) - _MOST_WORDS:,} more files are missing"]


def _core_facts(rank: dict[str, Any]) -> dict[str, Any]:
    names = ("folder", "rank", "world_size", "status", "steps", "captured", "missing")
    return {name: rank[name] for name in names if name in rank}


def describe_ranks(
    folder: Path, settings: Settings, code: int | None = None
) -> list[dict[str, Any]]:
    """Return what each rank left, what is missing, and why."""
    ranks = []
    for place in sorted(folder.glob("rank-*")):
        facts = _facts(place)
        captured = layout.captured_parts(place)
        missing = unwritten_parts(facts["problems"])
        missing.pop(layout.TRACE, None)
        if layout.TRACE not in captured and _wants_trace(facts):
            missing[layout.TRACE] = why_no_trace(facts, settings, code)
        ranks.append({"folder": place.name, **facts, "captured": captured, "missing": missing})
    return ranks


def _facts(place: Path) -> dict[str, Any]:
    from stepscope.trace.run_folder.rank_facts import read_facts

    nothing: dict[str, Any] = {"rank": None, "world_size": None, "status": "unreadable"}
    facts = nothing | {"problems": []} | read_facts(place)
    if facts["status"] == "unreadable":
        return facts | {"problems": _why_unwritten(place)}
    return facts


def _wants_trace(facts: dict[str, Any]) -> bool:
    """Return False where `--ranks` leaves the trace to others."""
    choice = facts.get("trace")
    return not isinstance(choice, dict) or bool(choice.get("chosen", True))


def _why_unwritten(place: Path) -> list[str]:
    """Say why a rank could not even write rank.json: try to write there now."""
    try:
        layout.check_room(place)
    except OSError as error:
        return [f"writing {layout.RANK}: {layout.why_refused(error)}"]
    return []


# Whether capture found the training: what to say while the command runs, and why nothing came.
#
# Everything is read from the run folder: the files of its hosts, which every Python process of the
# job writes to, and the ranks' steps.jsonl.

_NOT_LOADED_AFTER_S = 20.0  # Python processes usually start at once
_NO_STEP_AFTER_S = 4.0  # after the first backward pass
_SETTLED_AFTER_S = 2.0  # after the first step: by then all ranks have a few steps
_LAST_BYTES = 4096  # of a list of steps
_MOST_LOOKED_AT = 64  # hosts, and ranks: of thousands these tell enough
# Options with which Python ignores PYTHONPATH or the start-up file.
_ISOLATING = re.compile(r"-[a-zA-Z]*[IES][a-zA-Z]*$")
_PYTHON = re.compile(r"(python|pypy)[\d.]*$")
_RAY_CLUSTER = Path("/tmp/ray/ray_current_cluster")  # Ray notes there where it runs
_MPIRUN = ("mpirun", "mpiexec", "orterun")
_OTHERWISE = "run `python -m stepscope run -- train.py`, or call stepscope.watch() in the script"


class _Process(msgspec.Struct):
    event: str


class _Step(msgspec.Struct):
    step: StepNumber
    steps: int = 1  # of a stretch that begins there


def isolating_option(command: Sequence[str]) -> str | None:
    """Return the option that keeps stepscope out, as in `python -I train.py`."""
    for place, word in enumerate(command):
        if not _PYTHON.match(Path(word).name):
            continue
        for option in command[place + 1 :]:
            if not option.startswith("-") or option in ("-m", "-c", "-"):
                break
            if _ISOLATING.match(option):
                return f"{Path(word).name} {option}"
    return None


@dataclass(slots=True)
class Attachment:
    """Watches the run folder while the command runs, and reports each thing once."""

    folder: Path
    settings: Settings
    command: tuple[str, ...]
    began: float = field(default_factory=time.monotonic)
    done: bool = False
    pause_s: float = 0.2
    gives_up: bool = False
    _passed: float | None = None  # time of the first backward pass
    _stepped: float | None = None  # time of the first step
    _warned: bool = False

    def news(self) -> str | None:
        """Return a sentence worth printing now, if there is one."""
        events = count_events(self.folder)
        now = time.monotonic()
        if events[STEP]:
            self._stepped = self._stepped or now
            return self._attached() if now - self._stepped >= _SETTLED_AFTER_S else None
        if events[BACKWARD]:
            self._passed = self._passed or now
        return None if self._warned else self._missing(events, now)

    def _missing(self, events: Counter[str], now: float) -> str | None:
        sentence = None
        if self._passed is not None and now - self._passed >= _NO_STEP_AFTER_S:
            sentence = (
                "backward passes run, but no optimizer step was seen, so stepscope cannot tell "
                f"where a step ends. {_flags(self.settings)}"
            )
        elif not events[STARTED] and now - self.began >= _NOT_LOADED_AFTER_S:
            sentence = _not_loaded(self.command)
        self._warned = sentence is not None
        return sentence

    def _attached(self) -> str | None:
        ranks = sorted(self.folder.glob("rank-*"))
        steps = max((steps_seen(rank) for rank in ranks[:_MOST_LOOKED_AT]), default=0)
        if not steps:
            return None
        self.done = True
        processes = counted(len(ranks), "process", "processes")
        seen = counted(steps, "step")
        return f"attached to {processes}: {seen} seen, {_window_words(self.settings, steps)}"


def _window_words(settings: Settings, steps: int) -> str:
    coming = [window for window in Schedule.plan(settings).windows if window.last >= steps]
    if not coming:
        return "the window is recorded"
    ranges = [
        str(window.last) if window.active == 1 else f"{window.first_active} to {window.last}"
        for window in coming
    ]
    if len(ranges) > 1:
        ranges[-2:] = [f"{ranges[-2]} and {ranges[-1]}"]
    return f"window at {'step' if ranges == [str(coming[0].last)] else 'steps'} {', '.join(ranges)}"


def count_events(folder: Path) -> Counter[str]:
    """Return how many processes reached each stage."""
    events: Counter[str] = Counter()
    for file in processes_files(folder, _MOST_LOOKED_AT):
        with contextlib.suppress(UnreadableInputError):
            for line in LineFile(file):
                with contextlib.suppress(NotJsonError):
                    events[decode(line.text, _Process).event] += 1
    return events


def steps_seen(rank: Path) -> int:
    """Return the number of steps in a rank's list, read from its end."""
    try:
        lines = read_tail(rank / layout.STEPS, _LAST_BYTES).splitlines()
    except UnreadableInputError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(NotJsonError):
            last = decode(line, _Step)
            return last.step + last.steps
    return 0


def why_nothing(folder: Path, settings: Settings, command: Sequence[str], code: int) -> str:
    """Return why no training step was seen, and what to do about it."""
    events = count_events(folder)
    failed = f"the command failed (exit code {code})" if code else ""
    if events[FORKED]:
        return (
            "the script forked its training processes after it ran backward passes itself. "
            "stepscope cannot capture such processes. Fork them earlier, or start them with "
            'torch.multiprocessing.get_context("spawn") or with torchrun'
        )
    if events[BACKWARD]:
        if failed:
            return f"{failed} before a training step ended"
        return (
            "backward passes ran, but no optimizer step was seen, so stepscope cannot tell where a "
            f"step ends. {_flags(settings)}"
        )
    if events[TORCH]:
        if failed:
            return f"{failed} after it imported torch and before its first backward pass"
        return (
            "torch was imported, but no backward pass was seen. Either this command does not "
            "train, or torch.compile holds the whole step. In that case call stepscope.watch() in "
            f"the script{_ray_words()}"
        )
    if events[STARTED]:
        if failed:
            return f"{failed} before it imported torch"
        return (
            "no Python process that loaded stepscope imported torch. If a launcher or a container "
            f"starts the training with another PYTHONPATH, {_OTHERWISE}{_ray_words()}"
        )
    return f"{failed}; {_not_loaded(command)}" if failed else _not_loaded(command)


def _ray_words() -> str:
    """Workers of a cluster that is there inherit nothing from the command."""
    if not os.environ.get("RAY_ADDRESS") and not _RAY_CLUSTER.is_file():
        return ""
    return (
        ". If the training runs on an existing Ray cluster, use stepscope.ray.capture() "
        f"({SITE}/how-to/clusters/)"
    )


def _flags(settings: Settings) -> str:
    others = [kind for kind in ("backward", "dataloader", "forward") if kind != settings.step_on]
    return f"Name what ends a step: --step-on {', '.join(others[:-1])} or {others[-1]}"


def _not_loaded(command: Sequence[str]) -> str:
    option = isolating_option(command)
    if option:
        return (
            f"stepscope was not loaded, because `{option}` ignores PYTHONPATH. Remove that option, "
            "or call stepscope.watch() in the script"
        )
    if any(Path(word).name in _MPIRUN for word in command):
        return (
            "stepscope did not get into any Python process: Open MPI does not pass environment "
            "variables to other hosts. Use `mpirun -x STEPSCOPE_CAPTURE -x PYTHONPATH ...`, or "
            "start stepscope there: `mpirun ... stepscope run -- python train.py`"
        )
    return (
        "stepscope did not get into any Python process. Either the command is not Python, or its "
        f"launcher resets PYTHONPATH. If it is Python, {_OTHERWISE}"
    )


def why_no_trace(facts: dict[str, Any], settings: Settings, code: int | None = None) -> str:
    """Return why a rank that trained has no trace."""
    problems = [str(problem) for problem in facts.get("problems") or ()]
    problem = next((p for p in problems if p.startswith(("window", "saving"))), None)
    status = facts.get("status")
    if status == "unreadable":
        return problems[0] if problems else f"its {layout.RANK} could not be read"
    if status == "running":
        return problem or _unclosed(code)
    steps = facts.get("steps", 0)
    first = Schedule.plan(settings).windows[0].first_active
    if steps <= first:
        seen = f"{counted(steps, 'step')} {'was' if steps == 1 else 'were'} seen"
        return f"only {seen}; a trace needs at least {first + 1}"
    return problem or "; ".join(problems) or "not known"


def _unclosed(code: int | None) -> str:
    """The exit code may be a launcher's, which reports its ranks in its own way."""
    killed = code is not None and code > 128 and code - 128 in set(signal.Signals)
    if killed and code is not None:
        return (
            f"the process ended without closing: {signal.Signals(code - 128).name} ended the "
            "command"
        )
    return "the process ended without closing (killed, os._exit or a crash)"
