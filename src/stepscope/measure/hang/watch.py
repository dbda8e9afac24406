"""A thread that notices when steps no longer end, and then records once what this rank does.

It looks at the number of steps about once a second, which costs the training nothing in a step.
While a step takes unusually long it also looks for a request of another rank, or of
`stepscope run`: the rank that all others wait for may itself be within its own limits.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from time import monotonic, time  # a script may replace those of the module
from types import CodeType, FrameType
from typing import Any, Protocol

from stepscope.measure import folder as layout
from stepscope.measure.hang import evidence, system
from stepscope.measure.never_raise import note
from stepscope.measure.processes import RunningSession, is_child, is_library
from stepscope.measure.ranks import initialised_groups, rank_and_world
from stepscope.measure.writer import started_thread
from stepscope.records.folders import HANG, HANG_REQUEST, host_hang_file, this_host, this_process

PAUSE_S = 1.0
# A look that comes so late says that this process, or its machine, was stopped: the time counts
# for no step.
_STOPPED_S = 3.0
_LAST_S = 1.0
_LOOKS = 12  # of which the first and the last say whether files move
_CLOCKS_S = 5.0  # that clocks of a shared disk may differ
_LONG_PHASES = ("evaluation", "checkpoint", "compile", "between_epochs")


class PhaseNow(Protocol):
    """Says which phase runs, as far as the notes of the training thread have been read."""

    @property
    def phase(self) -> str: ...


class HangWatch:
    """One per process that trains; does nothing with `hang_after` 0."""

    def __init__(self, session: RunningSession, phases: PhaseNow) -> None:
        self._session, self._phases = session, phases
        self._least_s = session.settings.hang_after
        self._thread: threading.Thread | None = None
        self.workers = evidence.WorkerStacks(session.settings.folder)
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """The thread is not in a forked child, which may train as well."""
        self._thread = None
        self._stop = threading.Lock()  # held until the end: waiting for it costs less than an Event
        self._stop.acquire()
        self._patience = Patience(self._least_s)
        self._loop = TrainingLoop()
        self._number, self._since, self._since_unix = 0, monotonic(), time()
        self._looks: deque[dict[str, Any] | None] = deque(maxlen=_LOOKS)
        self._answered = 0.0  # when the last request that was answered was made
        self._record: dict[str, Any] | None = None
        self._folder: Path | None = None
        self._closed = False

    def start(self, folder: Path | None = None) -> None:
        """Begin to watch, if that has not begun; `folder`: the rank's, once its first step ends."""
        self._folder = folder or self._folder
        if self._thread is None and self._least_s > 0 and not self._closed:
            self._since, self._since_unix = monotonic(), time()
            self._thread = started_thread(self._run, "stepscope-hang")

    def close(self) -> None:
        """Training is over. The thread is hardly waited for: it may write to a slow disk."""
        if not self._closed:
            self._closed = True
            self._stop.release()
            if self._record is not None and self._thread is not None:
                self._thread.join(_LAST_S)  # it says that steps went on

    def _run(self) -> None:
        try:
            self._watch(min(PAUSE_S, self._least_s / 4))
        except Exception as error:
            note("hang", error)

    def _watch(self, pause_s: float) -> None:
        looked = monotonic()
        while not self._stop.acquire(timeout=pause_s):
            now = monotonic()
            number = self._session.number
            if number != self._number:
                self._progressed(number, now)
            elif now - looked > pause_s + _STOPPED_S:
                self._since += now - looked
            else:
                self._look(now)
            looked = monotonic()
        self._went_on("training ended")

    def _progressed(self, number: int, now: float) -> None:
        seconds = now - self._since
        self._went_on("a step ended")
        if number > self._number:
            self._patience.took(number - self._number, seconds)
            self._loop.saw(sys._current_frames().get(self._session.thread))
        self._number, self._since, self._since_unix = number, now, time()
        self._looks.clear()

    def _look(self, now: float) -> None:
        silent_s = now - self._since
        if silent_s < min(self._least_s / 2, 5.0):
            return
        self._looks.append(system.process_facts(os.getpid()))
        limit_s = self._patience.limit_s(is_long=False)
        if silent_s < limit_s and not self._is_asked():
            return
        phase = self._phase()
        limit_s = self._patience.limit_s(is_long=phase in _LONG)
        if self._is_asked():
            self._answered = self._asked_unix()
        elif self._record is not None or silent_s < limit_s:
            return
        suspects = silent_s >= limit_s
        if suspects and self._asked_unix() < self._since_unix - _CLOCKS_S:
            self._ask()
        self._write(phase, silent_s, limit_s, suspects=suspects)

    def _phase(self) -> str:
        """What the training thread does, as far as it is known."""
        session = self._session
        if self._number < 1:
            return "start_up"
        frame = sys._current_frames().get(session.thread)
        innermost = frame.f_code.co_filename if frame is not None else ""
        if f"{os.sep}stepscope{os.sep}measure{os.sep}" in innermost:
            return "capture"
        phase = self._phases.phase
        if phase in _LONG_PHASES:
            return phase
        if rare := rare_phase(frame):
            return rare
        return "after_training" if self._loop.has_left(frame) else phase

    # What ranks and `stepscope run` ask each other: a file in the run folder, by its time.

    @property
    def _request(self) -> Path:
        return Path(self._session.settings.folder) / HANG_REQUEST

    def _asked_unix(self) -> float:
        try:
            return os.stat(self._request).st_mtime  # noqa: PTH116 - one call
        except OSError:
            return 0.0

    def _is_asked(self) -> bool:
        asked = self._asked_unix()
        answered = self._answered
        if self._record is not None:  # several ranks ask at once
            answered = max(answered, self._record["noticed_unix"] + _CLOCKS_S)
        return asked > answered and asked > self._since_unix - _CLOCKS_S

    def _ask(self) -> None:
        layout.try_write_json(self._request, {"schema": 1, "unix": time(), "host": this_host()})
        self._answered = self._asked_unix()

    # hang.json

    def _write(self, phase: str, silent_s: float, limit_s: float, *, suspects: bool) -> None:
        """What may never answer comes last: until then the file says what is known."""
        session = self._session
        rank: int | None
        rank, world_size = rank_and_world()
        process = evidence.look_at_process(session.thread, self._looks[0] if self._looks else None)
        if is_child() and initialised_groups() is None:
            rank, world_size = evidence.numbers(process["threads"])
        self.workers.ask()  # what they read for it is none of their work
        self.workers.collect(process["children"], self._since_unix)
        kept: dict[str, Any] = {}
        if self._record is not None:  # what is asked last is at hand until it comes anew
            names = ("collectives", "device")
            kept = {name: self._record[name] for name in names if name in self._record}
        self._record = {
            "schema": 1,
            "rank": rank,
            "world_size": world_size,
            "noticed_unix": time(),
            "suspects": suspects,
            "silent_s": round(silent_s, 3),
            "limit_s": round(limit_s, 3),
            "usual_s": round(self._patience.usual_s, 6),
            "phase": phase,
            "step": self._number,
            "identity": _identity(),
            **process,
            **kept,
        }
        self._save()
        parts: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("collectives", evidence.look_at_collectives),
            ("device", evidence.look_at_device),
        )
        for name, look in parts:
            content = look()
            if content is not None:
                self._record[name] = content
                self._save()
        self._looks.clear()  # what was read for this

    def _went_on(self, how: str) -> None:
        record, self._record = self._record, None
        if record is not None:
            self._record = None
            self._save({**record, "went_on": {"unix": time(), "how": how}})

    def _save(self, record: dict[str, Any] | None = None) -> None:
        folder = self._folder
        path = folder / HANG if folder is not None else self._before_the_first_step()
        layout.try_write_json(path, record or self._record)

    def _before_the_first_step(self) -> Path:
        """A process gets its rank's folder when its first step ends."""
        path = host_hang_file(Path(self._session.settings.folder), this_host(), os.getpid())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            layout.note_unwritten(HANG, error)
        return path


_LONG = (*_LONG_PHASES, "import", "start_up", "after_training", "capture")


def _identity() -> dict[str, Any]:
    process = this_process()
    return {name: getattr(process, name) for name in process.__slots__}


# How long a run may go without a step, by the steps it has made so far.

_KEPT = 256  # looks
# A step may take so many usual ones, or the usual one and so many leasts; the usual one is that of
# the 99th percentile, but no more than so many medians.
_TIMES, _LEASTS, _MEDIANS = 20, 10, 5
_LONGEST = 2  # times the longest so far
LONG = 20  # leasts: the first steps, evaluation, checkpoints, compilation
FEWEST_STEPS = 3  # that have ended; the first ones are long


class Patience:
    """Told how many steps ended between two looks. `least_s`: never less than this."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._walls: deque[float] = deque(maxlen=_KEPT)
        self._longest_s = 0.0
        self.steps = 0

    def took(self, steps: int, seconds: float) -> None:
        first, self.steps = self.steps < FEWEST_STEPS, self.steps + steps
        if first:
            return
        self._walls.append(seconds / steps)
        # After one very long wait others of its length are not all expected.
        longest = min(seconds, LONG * self._least_s) if steps == 1 else seconds / steps
        self._longest_s = max(self._longest_s, longest)

    @property
    def usual_s(self) -> float:
        walls = sorted(self._walls)
        if not walls:
            return 0.0
        high = walls[min(len(walls) - 1, round(0.99 * len(walls)))]
        return min(high, _MEDIANS * walls[len(walls) // 2])

    def limit_s(self, *, is_long: bool) -> float:
        """`is_long`: what runs now is known to take longer than steps."""
        usual = self.usual_s
        step_s = min(_TIMES * usual, usual + _LEASTS * self._least_s)
        limit = max(self._least_s, step_s, _LONGEST * self._longest_s)
        is_long = is_long or self.steps < FEWEST_STEPS
        return max(limit, LONG * self._least_s) if is_long else limit


# Whether the training thread is still inside the loop that ends steps, or has left it. After the
# last step a script may write, plot or count for as long as it likes: that is no hang.

_MOST_LOOKS = 2000
_MOST_DEPTH = 400
_MOST_SOURCE = 4 << 20
_DECORATES = f"torch{os.sep}utils{os.sep}_contextlib.py"  # runs what @no_grad() decorates
_DISTRIBUTED = f"torch{os.sep}distributed{os.sep}"
_COMPILES = f"torch{os.sep}_dynamo{os.sep}convert_frame.py"
_IMPORTS = "<frozen importlib"
_NO_GRADIENTS = ("no_grad", "inference_mode")

Chain = list[tuple[CodeType, int]]  # outermost first


def own_chain(frame: FrameType | None) -> Chain:
    """Lines of the user's own files, from the script's outermost one inwards."""
    chain: Chain = []
    for _ in range(_MOST_DEPTH):
        if frame is None:
            break
        if not is_library(frame.f_code.co_filename):
            chain.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return chain[::-1]


class TrainingLoop:
    """Learns from looks at the training thread while steps end."""

    def __init__(self) -> None:
        self._lines: dict[int, tuple[CodeType, set[int]]] = {}
        self._looks = 0
        self._last: Chain = []

    def saw(self, frame: FrameType | None) -> None:
        """A step has ended since the last look, so that look was inside the loop; this runs now."""
        if self._looks < _MOST_LOOKS:
            self._looks += 1
            for code, line in self._last:
                self._lines.setdefault(id(code), (code, set()))[1].add(line)
            self._last = own_chain(frame)

    def has_left(self, frame: FrameType | None) -> bool:
        """False where it cannot be said."""
        for code, line in own_chain(frame):
            seen = self._lines.get(id(code))
            if seen is None:
                return False  # called from a line of the loop
            loops = _blocks(code.co_filename)[0]
            if any(first <= line <= last and _meets(seen[1], first, last) for first, last in loops):
                return False
            if line not in seen[1]:
                return True
        return False


def rare_phase(frame: FrameType | None) -> str:
    """What the stack alone tells: evaluation, if own code runs without gradients, or compilation,
    which begins with imports. Empty for what may be a step."""
    is_own = False  # the frame that this one has called
    for _ in range(_MOST_DEPTH):
        if frame is None:
            break
        file, line = frame.f_code.co_filename, frame.f_lineno or 0
        if _DISTRIBUTED in file:
            break  # it waits for others, which decide
        if file.startswith(_IMPORTS) or file.endswith(_COMPILES):
            return "import" if file.startswith(_IMPORTS) else "compile"
        if is_own and file.endswith(_DECORATES):
            return "evaluation"
        is_own = not is_library(file)
        if is_own and any(first <= line <= last for first, last in _blocks(file)[1]):
            return "evaluation"
        frame = frame.f_back
    return ""


def _meets(lines: set[int], first: int, last: int) -> bool:
    return any(first <= line <= last for line in lines)


@lru_cache(maxsize=16)
def _blocks(file: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """First and last lines of loops, and of blocks without gradients; none without the source."""
    syntax: Any = sys.modules.get("ast")  # torch has loaded it
    if syntax is None or not hasattr(syntax, "walk"):
        return [], []
    try:
        nodes = list(syntax.walk(syntax.parse(system.read_text(file, _MOST_SOURCE))))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [], []
    loops = [n for n in nodes if isinstance(n, syntax.For | syntax.While | syntax.AsyncFor)]
    heads = ((n, item) for n in nodes if isinstance(n, syntax.With) for item in n.items)
    quiet = [n for n, head in heads if any(word in syntax.dump(head) for word in _NO_GRADIENTS)]
    return [(n.lineno, n.end_lineno) for n in loops], [(n.lineno, n.end_lineno) for n in quiet]
