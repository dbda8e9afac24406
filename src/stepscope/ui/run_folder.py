"""The run folder as `run` uses it: claimed for one run, described while it lasts, then closed."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stepscope
from stepscope.errors import UsageError
from stepscope.measure import folder as layout
from stepscope.measure.kept_json import KeptJson
from stepscope.records.applied_remedy import AppliedRemedy, RunRemedy, join_ranks
from stepscope.records.process_identity import this_process
from stepscope.records.unwritten import unwritten_parts
from stepscope.ui.attachment import why_no_trace
from stepscope.ui.say import say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stepscope.measure.settings import Settings

_MOST_SIGNALS = 20
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
    """For verbs that can do nothing without a folder: always a UsageError."""
    try:
        return claim(out, command).path
    except OSError as error:
        raise UsageError(
            f"no folder for the capture can be made: {error}; --out names another"
        ) from None


def script_of(command: Sequence[str]) -> str:
    """What the run is called: the script, else the module after -m, else the program."""
    for word in command:
        if word.endswith((".py", ".sh")):
            return word
    modules = [
        module for option, module in pairwise(command) if option == "-m" and _MODULE.match(module)
    ]
    if modules:
        return modules[-1]
    return "stdin" if "-" in command[1:2] else command[0]


class SignalDiary(ABC):
    """Keeps a record of a command that is running: what it was told, and who closes it."""

    __slots__ = ()
    record: dict[str, Any]

    def heard(self, number: int) -> None:
        """Record a signal for the command, in case nothing else gets written."""
        if len(self.record["signals"]) < _MOST_SIGNALS:
            self.record["signals"].append({"signal": _name(number), "unix": time.time()})
            self.write_again()

    def handed_over(self) -> None:
        """The command is about to replace this process: nobody will close the folder."""
        self.record["status"] = "handed over"
        self.write_again()

    @abstractmethod
    def write_again(self) -> None:
        """Write the record as it is now."""


@dataclass(slots=True)
class RunFile(SignalDiary):
    """run.json of a run that is alone in its folder, from its start to its end."""

    folder: Path
    settings: Settings
    record: dict[str, Any]
    _file: KeptJson = field(init=False)

    def __post_init__(self) -> None:
        self._file = KeptJson(self.folder / layout.RUN)

    @classmethod
    def begin(cls, folder: Path, command: Sequence[str], settings: Settings) -> RunFile:
        """OSError if it cannot be written; of several runs in one folder only one gets here."""
        run = cls(folder, settings, begin_record(command, settings))
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

    def write_again(self) -> None:
        with contextlib.suppress(OSError):
            self._file.write(self.record)

    def close(self, code: int) -> list[dict[str, Any]]:
        """The command has ended: record and return what each rank left."""
        layout.remove_leftovers(self.folder)
        ranks = describe_ranks(self.folder, self.settings, code)
        self.record |= describe_end(code, ranks)
        try:
            self._file.write(*shortened(self.record, ranks), last=True)
        except OSError as error:
            say(f"{self._file.path} could not be written: {layout.why_refused(error)}")
        return ranks


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
    """What is written about a command before it starts."""
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
        "remedies": list(settings.remedies),
    }


def describe_end(code: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What run.json says once the command has ended."""
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
    """What became of each remedy of `--with` in all ranks."""
    told = [
        [AppliedRemedy(**remedy) for remedy in rank["remedies"]]
        for rank in ranks
        if isinstance(rank.get("remedies"), list)
    ]
    return [f"with {remedy.words}{_did(remedy)}" for remedy in join_ranks((), told)]


def _did(remedy: RunRemedy) -> str:
    return f": {remedy.detail}" if remedy.outcome == "applied" else ""


def missing_words(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """What ranks lack and why, a sentence each; of many ranks the first ones."""
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
    """What each rank left, what is missing, and why."""
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
    from stepscope.trace.rank_facts import read_facts

    nothing: dict[str, Any] = {"rank": None, "world_size": None, "status": "unreadable"}
    facts = nothing | {"problems": []} | read_facts(place)
    if facts["status"] == "unreadable":
        return facts | {"problems": _why_unwritten(place)}
    return facts


def _wants_trace(facts: dict[str, Any]) -> bool:
    """Not where `--ranks` leaves the trace to others."""
    choice = facts.get("trace")
    return not isinstance(choice, dict) or bool(choice.get("chosen", True))


def _why_unwritten(place: Path) -> list[str]:
    """Why a rank could not even write rank.json: try to write there now."""
    try:
        layout.check_room(place)
    except OSError as error:
        return [f"writing {layout.RANK}: {layout.why_refused(error)}"]
    return []
