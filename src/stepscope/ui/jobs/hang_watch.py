"""Watch a command's ranks from outside while it runs: say who hangs, and end the job if asked.

Ranks record themselves (measure/hang). From outside `run` adds what a rank cannot: that it is
stopped, has ended, or sits in a call that lets no other thread of it run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import HANG_ENDED, StepscopeError
from stepscope.measure import folder as layout
from stepscope.measure.hang import system
from stepscope.measure.processes import STEP
from stepscope.records.folders import (
    HANG,
    HANG_REQUEST,
    host_hang_file,
    processes_file,
    this_host,
)
from stepscope.text.figures import long_duration
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.files import LineFile, read_tail
from stepscope.trace.run_folder.run_state import signal_name
from stepscope.ui.jobs.process import News
from stepscope.ui.say import SAYS

_LOOK_S = 1.0
_SETTLE_S = 10.0  # until all ranks have answered a request
_ALONE_S = 2.0  # where this host's have: other hosts' may follow, and collectives come last
_SILENT = 2.0  # times --hang-after: ranks themselves notice earlier
_APART_S = 1.0  # two looks at what moves
_NATIVE_S, _MOST_NATIVE = 10.0, 4
_TERM_S, _KILL_S = 10.0, 5.0
_LAST_LINES, _LONGEST_LINE, _TAIL_BYTES = 8, 300, 16 << 10  # of stderr


class _Line(msgspec.Struct):
    """Of hosts/*.processes.jsonl."""

    event: str = ""
    pid: int = 0
    rank: int | None = None
    rank_folder: str = ""
    started_ticks: int = 0
    stderr: str = ""


@dataclass(slots=True)
class HangNews:
    """Also passes on other news. `reads`: this part of the job explains and announces it."""

    folder: Path
    hang_after_s: float
    inner: News | None = None
    reads: bool = True
    announces: bool = True
    ends: bool = False
    done: bool = False
    pause_s: float = 0.2
    gives_up: bool = False  # the command itself has to be ended
    exit_code: int | None = None  # of a job that this watch has ended
    _ranks: dict[str, _Line] = field(default_factory=dict)
    _known_size: int = 0
    _stamps: dict[str, int] = field(default_factory=dict)
    _since: float = field(default_factory=time.monotonic)
    _since_unix: float = field(default_factory=time.time)
    _next_look: float = 0.0
    _ask_at: float = 0.0  # seconds without a step
    _handled: float = 0.0  # the time of the last request that was looked at
    _seen: float | None = None  # when a new request was seen
    _told: bool = False
    _ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    _killed: int = field(default_factory=system.killed_for_memory)
    _pids: list[int] = field(default_factory=list)
    _ending: list[tuple[float, int]] = field(default_factory=list)

    def news(self) -> str | None:
        """Return a sentence worth printing now."""
        inner = self.inner
        if inner is not None and not inner.done:
            sentence = inner.news()
            if sentence:
                return sentence
        else:
            self.pause_s = _LOOK_S
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + _LOOK_S
        if self._ending:
            self._go_on_ending(now)
            return None
        return self._look(now)

    def _look(self, now: float) -> str | None:
        if self._progressed():
            silent_s, self._since, self._since_unix = now - self._since, now, time.time()
            self._seen, self._ask_at = None, _SILENT * self.hang_after_s
            told, self._told = self._told, False
            if told and self.announces:
                return f"no hang: steps go on after {long_duration(1e9 * silent_s)}"
            return None
        asked = self._asked_unix()
        if asked > self._handled and asked > self._since_unix - _LOOK_S:
            self._handled, self._seen = asked, now
        elif now - self._since >= (self._ask_at or _SILENT * self.hang_after_s) and self._ranks:
            self._ask_at = 2 * (now - self._since)
            self._ask()
        if self._seen is None or now - self._seen < (
            _ALONE_S if all(map(self._has_answered, self._ranks)) else _SETTLE_S
        ):
            return None
        self._seen = None
        self._observe()
        return self._explain() if self.reads else None

    # What is there.

    def _progressed(self) -> bool:
        """Whether a rank of this host has written steps since the last look."""
        self._find_ranks()
        self._note_ends()
        stamps = {}
        for name in self._ranks:
            with contextlib.suppress(OSError):
                stamps[name] = (self.folder / name / layout.STEPS).stat().st_mtime_ns
        before, self._stamps = self._stamps, stamps
        return stamps != before

    def _find_ranks(self) -> None:
        """A process of this host writes a line when its first step ends."""
        file = processes_file(self.folder, this_host())
        try:
            size_bytes = file.stat().st_size
        except OSError:
            return
        if size_bytes == self._known_size:
            return
        self._known_size = size_bytes
        with contextlib.suppress(StepscopeError):
            for line in LineFile(file):
                with contextlib.suppress(NotJsonError):
                    known = decode(line.text, _Line)
                    name = Path(known.rank_folder).name
                    if known.event == STEP and name and name not in self._ranks:
                        stat = system.Stat.read(f"/proc/{known.pid}/stat")
                        known.started_ticks = stat.started_ticks if stat else 0
                        self._ranks[name] = known

    def _note_ends(self) -> None:
        """How ranks ended, and what they wrote last: soon others write to the same file."""
        for name, line in self._ranks.items():
            if name in self._ends:
                continue
            stat = system.Stat.read(f"/proc/{line.pid}/stat")
            if stat is not None and stat.started_ticks != line.started_ticks:
                stat = None
            if stat is not None and stat.state not in "ZX":
                continue
            others = [other.stderr for other in self._ranks.values() if other is not line]
            self._ends[name] = {
                "ended_by": _how_it_ended(stat.status) if stat is not None else "",
                "out_of_memory": max(0, system.killed_for_memory() - self._killed),
                "shares_stderr": line.stderr in others,
                **_last_words(line.stderr),
            }

    def _asked_unix(self) -> float:
        try:
            return (self.folder / HANG_REQUEST).stat().st_mtime
        except OSError:
            return 0.0

    def _ask(self) -> None:
        content = {"schema": 1, "unix": time.time(), "host": this_host()}
        with contextlib.suppress(OSError):
            layout.write_json(self.folder / HANG_REQUEST, content)

    # What is recorded from outside.

    def _observe(self) -> None:
        pids = [line.pid for line in self._ranks.values()]
        looks = system.look_twice(pids, _APART_S)
        rows: list[dict[str, Any]] = []
        natives = 0
        for name, line in self._ranks.items():
            row = {"pid": line.pid, "rank": line.rank, "folder": name}
            row |= looks.get(line.pid) or {"gone": True}
            if row.get("gone") or row.get("state") in ("Z", "X"):
                row |= self._ends.get(name, {})
            if not self._has_answered(name) and not row.get("gone") and natives < _MOST_NATIVE:
                natives += 1
                row["native"] = _native_stack(line.pid)
            rows.append(row)
        content = {"schema": 1, "host": this_host(), "noticed_unix": time.time(), "ranks": rows}
        with contextlib.suppress(OSError):
            layout.write_json(host_hang_file(self.folder, this_host()), content)

    def _has_answered(self, name: str) -> bool:
        try:
            return (self.folder / name / HANG).stat().st_mtime >= self._since_unix
        except OSError:
            return False

    def _explain(self) -> str | None:
        from stepscope.explain.hang import explain_hang
        from stepscope.trace.run_folder.hang_files import read_hang

        try:
            evidence = read_hang(self.folder)
            answer = explain_hang(evidence, time.time())
        except StepscopeError:
            return None
        if not answer.is_hang:
            return None
        again, self._told = self._told, True
        if self.ends:
            pids = [rank.pid for rank in evidence.ranks if rank.state == "running" and rank.pid]
            self._begin_ending(pids)
        if again or not self.announces:
            return None
        return f"{answer.verdict} More: stepscope hang {self.folder}"

    # What `--on-hang end` does.

    def _begin_ending(self, pids: list[int]) -> None:
        """Of processes whose start was checked against the one that wrote rank.json."""
        self._pids = pids
        self.exit_code = HANG_ENDED
        now = time.monotonic()
        self._ending = [(now, signal.SIGTERM), (now + _TERM_S, signal.SIGKILL)]
        self._go_on_ending(now)

    def _go_on_ending(self, now: float) -> None:
        """Ranks first: a launcher ends by itself when they have."""
        while self._ending and now >= self._ending[0][0]:
            at, number = self._ending.pop(0)
            for pid in self._pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
            if number == signal.SIGKILL:
                self._ending.append((at + _KILL_S, 0))
            elif not number:
                self.gives_up = True


def _how_it_ended(status: int) -> str:
    return signal_name(128 + os.WTERMSIG(status)) or f"exit code {os.WEXITSTATUS(status)}"


def _last_words(stderr: str) -> dict[str, Any]:
    """The last lines of a file; what went through a pipe or to a terminal is with its reader."""
    if not stderr.startswith("/") or stderr.startswith("/dev/"):
        kind = "a pipe" if stderr.startswith(("pipe:", "socket:")) else stderr and "a terminal"
        return {"stderr": "/dev/null" if stderr == "/dev/null" else kind}
    lines = []
    with contextlib.suppress(StepscopeError):
        lines = read_tail(Path(stderr), _TAIL_BYTES).decode(errors="replace").splitlines()
    own = [line[:_LONGEST_LINE] for line in lines if line.strip() and not line.startswith(SAYS)]
    return {"stderr": stderr, "last_lines": own[-_LAST_LINES:]}


def _native_stack(pid: int) -> str:
    """What py-spy prints, where it is installed and may look."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--native", "--pid", str(pid)],
            capture_output=True,
            timeout=_NATIVE_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")[: 64 << 10]
