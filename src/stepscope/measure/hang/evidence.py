"""What one rank looks like while no step ends: stacks, threads, children, collectives, device."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import threading
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import Any

from stepscope.measure import folder as layout
from stepscope.measure.cluster import flight_recorder, parallel_layout
from stepscope.measure.cuda_graphs import gate
from stepscope.measure.hang import system
from stepscope.measure.never_raise import never_raise, note
from stepscope.measure.processes import is_library
from stepscope.measure.writer import started_thread
from stepscope.records.folders import HANG_REQUEST, HOSTS, this_host

_MOST_THREADS, _DEEPEST = 100, 60
_LONGEST_LINE = 160  # characters of source
APART_S = 0.5  # two looks at what moves
_LAST_COLLECTIVES = 20
_MOST_OPEN = 100
_KEPT = (
    *("kind", "group", "sequence", "p2p", "size_bytes", "input_sizes", "dtype"),
    *("created_ns", "ended", "state", "name"),
)
_DEVICE_S = 2.0  # that a device may take to say whether it is busy
_OURS = f"{os.sep}stepscope{os.sep}measure{os.sep}"
# Functions of torch whose arguments say which rank this is, or which one it waits for.
_DISTRIBUTED = f"torch{os.sep}distributed{os.sep}distributed_c10d.py"
_SPAWNED = f"torch{os.sep}multiprocessing{os.sep}spawn.py"
_NUMBERS = ("rank", "world_size", "src", "dst", "group_src", "group_dst", "i")


def look_at_process(training_thread: int, earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Everything but collectives and the device: these ask torch, and torch may not answer.

    `earlier`: facts of this process some seconds ago."""
    children = system.children_of(os.getpid())
    before = system.task_facts(os.getpid())
    looks = system.look_twice([os.getpid(), *children], APART_S)
    own = looks.pop(os.getpid(), None) or {}
    lately = {"lately": system.moved(earlier, own)} if earlier and own else {}
    return {
        "process": lately | {n: own[n] for n in ("state", "rss_bytes", "moved") if n in own},
        "threads": threads(training_thread, before),
        "children": list(looks.values()),
        "connections": system.connections(),
    }


def threads(training_thread: int, before: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Every Python thread but ours, the one that trains first; `before`: tasks some time ago."""
    tasks = system.task_facts(os.getpid())
    known = {thread.ident: thread for thread in threading.enumerate()}
    rows = []
    for ident, frame in sys._current_frames().items():
        thread = known.get(ident)
        name = thread.name if thread is not None else ""
        if name.startswith("stepscope-"):
            continue
        native = thread.native_id if thread is not None else None
        if thread is threading.main_thread():
            native = os.getpid()  # a forked child's thread still has its parent's number
        task = tasks.get(native or 0, {})
        cpu = task.pop("cpu_ticks", None)
        then = before.get(native or 0, {}).get("cpu_ticks")
        if cpu is not None and then is not None:
            task["cpu_s"] = (cpu - then) / os.sysconf("SC_CLK_TCK")
        rows.append(
            {
                "name": name,
                "native_id": native,
                "trains": ident == training_thread,
                **task,
                "frames": frames(frame),
            }
        )
    rows.sort(key=lambda row: (not row["trains"], row["name"] != "MainThread"))
    return rows[:_MOST_THREADS]


def frames(frame: FrameType | None) -> list[dict[str, Any]]:
    """Innermost first; of the user's own files also the line's text, where it can be read."""
    rows: list[dict[str, Any]] = []
    while frame is not None and len(rows) < _DEEPEST:
        code = frame.f_code
        if _OURS not in code.co_filename:
            row = {"file": code.co_filename, "line": frame.f_lineno, "function": code.co_qualname}
            if not is_library(code.co_filename):
                row["own"] = True
                row["text"] = source_line(code.co_filename, frame.f_lineno)
            elif code.co_filename.endswith((_DISTRIBUTED, _SPAWNED)):
                known = {name: frame.f_locals.get(name) for name in _NUMBERS}
                row["numbers"] = {n: v for n, v in known.items() if type(v) is int and v >= 0}
            rows.append(row)
        frame = frame.f_back
    return rows


def numbers(rows: list[dict[str, Any]]) -> tuple[int | None, int]:
    """Rank and world size of a child that has no process group yet, by its own calls."""
    known: dict[str, int] = {}
    for frame in rows[0]["frames"] if rows else ():
        known |= frame.get("numbers", {})
    return known.get("rank", known.get("i")), known.get("world_size", 1)


def source_line(file: str, number: int | None) -> str:
    """Empty if there is no such line, or it would have to be waited for."""
    if not number or not os.path.isfile(file):  # noqa: PTH113 - a pipe would be waited for
        return ""
    lines = system.read_text(file, 4 << 20).splitlines()
    return lines[number - 1].strip()[:_LONGEST_LINE] if number <= len(lines) else ""


# Collectives, from torch's own recorder.


@never_raise
def look_at_collectives() -> dict[str, Any] | None:
    """The groups of this rank, how far each came here, and their last collectives."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return None
    groups = parallel_layout.groups()
    if not groups:
        return None
    sizes = {group["name"]: group["size"] for group in groups}
    lines: list[dict[str, Any]] = []
    reached: dict[str, dict[str, int]] = {}
    for _, dump in flight_recorder.recorders():
        content = json.loads(dump())
        entries = content.get("entries") or []
        _add_reached(reached, entries)
        still_open = [entry for entry in entries if not entry.get("retired")][-_MOST_OPEN:]
        last = [entry for entry in entries[-_LAST_COLLECTIVES:] if entry.get("retired")]
        lines += [
            {**flight_recorder.as_line(entry, sizes, None), **_ended(entry)}
            for entry in (*last, *still_open)
        ]
    lines.sort(key=lambda line: int(line["created_ns"]))
    return {
        "groups": groups,
        "reached": reached,
        "last": [{name: line[name] for name in _KEPT} for line in lines],
    }


def _ended(entry: dict[str, Any]) -> dict[str, Any]:
    state = str(entry.get("state", ""))
    return {"ended": bool(entry.get("retired")) or state == "completed", "state": state}


def _add_reached(reached: dict[str, dict[str, int]], entries: list[dict[str, Any]]) -> None:
    """The highest sequence number that this rank has entered, and that has ended, by group."""
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        group = (entry.get("process_group") or [""])[0]
        numbers = reached.setdefault(group, {"entered": 0, "ended": 0})
        sequence = int(entry["collective_seq_id"])
        numbers["entered"] = max(numbers["entered"], sequence)
        if _ended(entry)["ended"]:
            numbers["ended"] = max(numbers["ended"], sequence)


# The device: whether it has done what was queued. A driver that hangs must not hang us.


@never_raise
def look_at_device() -> dict[str, Any] | None:
    """None where no GPU is in use. `answers` is False if even the question hung."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    answer: dict[str, Any] = {"answers": False}

    def ask() -> None:
        try:
            with gate.kept_open() as is_open:
                if not is_open:
                    answer.update(answers=True, busy=None)
                    return
                stream = torch.cuda.default_stream()
                answer.update(answers=True, busy=not stream.query())
        except Exception as error:
            answer.update(answers=True, error=f"{type(error).__name__}: {error}"[:300])

    thread = started_thread(ask, "stepscope-device")
    if thread is None:
        return None
    thread.join(_DEVICE_S)
    answer["device"] = _device_name(torch) if answer["answers"] else None
    return answer


def _device_name(torch: Any) -> str | None:
    with contextlib.suppress(Exception):
        return str(torch.cuda.get_device_name())
    note("device", "its name cannot be read")
    return None


# Stacks of data loader workers: each writes its own when the rank's watch asks.
#
# A worker is usually forked while its loader's iterator is created, and shares a page of memory
# with the rank. A thread of its own looks at that page twice a second, without a system call.

_PAUSE_S = 0.5
_ANSWER_S = 3.0
_LOOK_S = 0.05
_MOST_BYTES = 4 << 20
_MOST_ASKED = 250  # a page's byte counts the questions


class WorkerStacks:
    """One object on both sides of the fork."""

    def __init__(self, run: str) -> None:
        self._run = Path(run)
        self._page: mmap.mmap | None = None
        self._rank_pid = os.getpid()
        self._begun = False

    @never_raise
    def share(self) -> None:
        """In the rank, before its first loader starts workers."""
        if self._page is None:
            self._page, self._rank_pid = mmap.mmap(-1, mmap.PAGESIZE), os.getpid()

    @never_raise
    def begin(self) -> None:
        """In a worker, before it makes batches."""
        if self._begun or (self._page is not None and os.getpid() == self._rank_pid):
            return
        self._begun = True
        started_thread(self._answer, "stepscope-worker")

    @never_raise
    def _answer(self) -> None:
        answered = self._asked()
        while True:
            sleep(_PAUSE_S)
            if (asked := self._asked()) != answered:
                answered = asked
                main = threading.main_thread().ident or 0
                layout.try_write_json(self._file(os.getpid()), threads(main, {}))

    def _asked(self) -> float:
        """A worker that was spawned shares no page: it looks at the job's request."""
        if self._page is not None:
            return self._page[0]
        try:
            return (self._run / HANG_REQUEST).stat().st_mtime
        except OSError:
            return 0.0

    def _file(self, pid: int) -> Path:
        return self._run / HOSTS / f".worker-{this_host()}.{pid}.json"

    # In the rank.

    def ask(self) -> None:
        """Let the workers write while this process looks at other things."""
        if self._page is not None:
            self._page[0] = (self._page[0] + 1) % _MOST_ASKED

    def collect(self, children: list[dict[str, Any]], since_unix: float) -> None:
        """Add the stacks that came since the last step, and wait a little for the others."""
        until = monotonic() + _ANSWER_S
        waiting = list(children) if self._page is not None else []
        if not (self._run / HOSTS).is_dir():
            return
        while waiting:
            waiting = [child for child in waiting if not self._take(child, since_unix)]
            if monotonic() >= until:
                break
            sleep(_LOOK_S)

    def _take(self, child: dict[str, Any], since_unix: float) -> bool:
        file = self._file(int(child["pid"]))
        with contextlib.suppress(OSError, ValueError):
            facts = file.stat()
            is_new = facts.st_mtime >= since_unix
            if is_new and facts.st_size <= _MOST_BYTES:
                child["threads"] = json.loads(file.read_text())
            layout.remove(file)
            return is_new
        return False
