"""Share one GPU between trainings whose step times count.

    python benchmarks/library_turn.py FOLDER SCRIPT [ARGUMENTS]

Trainings start, build, compile and warm up beside each other. From its sixth step on (a training
that is profiled: from its beginning) a training has the device to itself until its last step: all
others that use the same folder are stopped (SIGSTOP), with the processes that compile for them.
Whoever waits for the device does nothing else and is not stopped: it keeps its place in the queue,
which the kernel serves in order. `keep_going` in the process that starts them lets them go on when
nobody is being timed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_WARM_UP = 6  # steps
_DRAIN_S = 0.3  # until what the others have launched is done
_GRACE_S = 0.3  # before the others are stopped: who has just been woken gets into the line
FOLDER_VARIABLE = "STEPSCOPE_TURNS"
_LOOK_S = 0.05
_NEVER = 1_000_000_000  # the step of a window that a trial never opens


class Turns:
    """The trainings that share a device, by a folder with a file for each and a lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: int | None = None  # while this process has the device alone
        self._began = 0.0
        self.waited_s = self.alone_s = 0.0
        folder.mkdir(parents=True, exist_ok=True)

    def enter(self) -> None:
        """This process will use the device; wait while another one is timed."""
        (self._folder / str(os.getpid())).touch()
        os.close(self._wait_in_line())

    def begin(self) -> None:
        """Have the device alone from now on, until `end` or the end of the process."""
        self._lock = self._wait_in_line()
        signal_all(children_of(os.getpid()), signal.SIGCONT)  # stopped while this process waited
        time.sleep(_GRACE_S)
        self._began = time.monotonic()
        self._signal_others(signal.SIGSTOP)
        time.sleep(_DRAIN_S)

    def end(self) -> None:
        if self._lock is not None:
            self.alone_s += time.monotonic() - self._began
            self._signal_others(signal.SIGCONT)
            os.close(self._lock)
            self._lock = None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def keep_going(self, stop: threading.Event) -> None:
        """Wake all whenever nobody is being timed: one that ended could not."""
        while not stop.wait(_LOOK_S):
            lock = self._open()
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._signal_others(signal.SIGCONT)
            except BlockingIOError:
                pass
            finally:
                os.close(lock)

    @contextlib.contextmanager
    def kept_going(self) -> Iterator[None]:
        stop = threading.Event()
        thread = threading.Thread(target=self.keep_going, args=(stop,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _wait_in_line(self) -> int:
        """The lock, once it is this process's turn."""
        waits, began = self._waits(os.getpid()), time.monotonic()
        waits.touch()
        lock = self._open()
        fcntl.flock(lock, fcntl.LOCK_EX)
        waits.unlink(missing_ok=True)
        self.waited_s += time.monotonic() - began
        return lock

    def _waits(self, process: int) -> Path:
        """A file that is there while this process waits for the device."""
        return self._folder / f"{process}.waits"

    def _open(self) -> int:
        return os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR)

    def _signal_others(self, number: signal.Signals) -> None:
        for entry in self._folder.iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                process = int(entry.name)
                waits = self._waits(process)
                if not Path("/proc", entry.name).exists():
                    entry.unlink(missing_ok=True)
                    waits.unlink(missing_ok=True)
                    continue
                stays_in_line = number == signal.SIGSTOP and waits.exists()
                signal_all([] if stays_in_line else [process], number)
                signal_all(children_of(process), number)


def shared_turns(*, stops: bool = True) -> Turns | None:
    """Those of the folder that the environment names: benchmarks that time within themselves have
    the device alone by these while others train beside them. One that does not stop for others
    must leave the device to them: it compiles."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return None
    turns = Turns(Path(folder))
    if stops:
        turns.enter()
    return turns


@contextlib.contextmanager
def side_by_side(at_once: int) -> Iterator[ThreadPoolExecutor]:
    """A pool for so many children that share the device by turns, and the cores for compiling."""
    with tempfile.TemporaryDirectory() as own:
        os.environ.setdefault(FOLDER_VARIABLE, own)
        threads = max(1, (os.cpu_count() or 1) // at_once)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
        turns = Turns(Path(os.environ[FOLDER_VARIABLE]))
        with turns.kept_going(), ThreadPoolExecutor(at_once) as pool:
            yield pool


def signal_all(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def end_with_children(process: int) -> None:
    """Kill a process and all that it started: trainings, and compilers that would go on alone."""
    signal_all([process, *children_of(process)], signal.SIGKILL)


def children_of(process: int) -> list[int]:
    """And theirs."""
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *children_of(child)]
    return found


def _is_profiled() -> bool:
    """Whether stepscope opens a window in this training: its early steps count then."""
    settings = json.loads(os.environ.get("STEPSCOPE_CAPTURE") or "{}")
    return bool(settings) and (settings.get("wait") or 0) < _NEVER


def _end_turn_on_exit(turns: Turns) -> None:
    """A trial ends with os._exit after its last step; tearing down CUDA takes a second more, which
    nobody need wait for."""
    leave = os._exit

    def end_turn_and_leave(code: int) -> None:
        turns.end()
        leave(code)

    os._exit = end_turn_and_leave


def main() -> None:
    folder, script = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).absolute().parent)
    turns = Turns(Path(folder))
    turns.enter()  # imports would slow the host of a training that is being timed

    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    seed, steps = torch.manual_seed, [0]
    _end_turn_on_exit(turns)

    def enter_and_seed(number: int) -> Any:
        torch.manual_seed = seed
        turns.enter()
        if _is_profiled():
            turns.begin()
            steps[0] = _WARM_UP
        return seed(number)

    def count(*_: Any) -> None:
        steps[0] += 1
        if steps[0] == _WARM_UP:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            turns.begin()

    torch.manual_seed = enter_and_seed
    register_optimizer_step_post_hook(count)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
