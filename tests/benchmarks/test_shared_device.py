"""Several processes on one device: its time in turns, its memory by claims."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import device_room
import library_turn
from device_room import CONTEXT_BYTES, Room, needed

HERE = Path(library_turn.__file__).parent


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)


def state(process: int) -> str:
    """S sleeps, T is stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


TURN = """
import sys, time
from pathlib import Path
from library_turn import Turns
turns = Turns(Path(sys.argv[1]))
turns.enter()
print("entered", flush=True)
with turns.alone():
    print("alone", flush=True)
    time.sleep(float(sys.argv[2]))
"""
BUSY = """
import sys, time
from pathlib import Path
from library_turn import Turns
Turns(Path(sys.argv[1])).enter()
print("entered", flush=True)
time.sleep(60)
"""


def test_others_are_stopped_while_one_is_timed_but_not_those_in_the_queue(tmp_path: Path) -> None:
    busy = start(BUSY, tmp_path)
    assert first_line(busy) == "entered"
    with library_turn.Turns(tmp_path).alone():
        assert state(busy.pid) == "T"
        queued = start(TURN, tmp_path, 0)
        wait_for(tmp_path / f"{queued.pid}.waits")
        library_turn.Turns(tmp_path)._signal_others(library_turn.signal.SIGSTOP)
        assert state(queued.pid) != "T"
    assert queued.communicate(timeout=30)[0].split() == ["entered", "alone"]
    assert queued.returncode == 0
    assert not list(tmp_path.glob("*.waits"))
    busy.kill()
    busy.communicate()


# Imported instead of torch, at a training's very beginning.
FAKE_TORCH = """
import os
from pathlib import Path
print(Path(os.environ["TURNS"], str(os.getpid())).exists())
raise SystemExit
"""


def test_a_training_can_be_stopped_while_it_still_imports(tmp_path: Path) -> None:
    """Imports of one keep cores busy, and slow the host of another that is timed."""
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    turns = tmp_path / "turns"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TURNS": str(turns)}
    command = [
        sys.executable,
        str(HERE / "library_turn.py"),
        str(turns),
        str(tmp_path / "train.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "True"


CLAIM = """
import sys, time
from pathlib import Path
from device_room import Room
with Room(Path(sys.argv[1]), 100).held(int(sys.argv[2])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_claim_waits_until_there_is_room(tmp_path: Path) -> None:
    room = Room(tmp_path, 100)
    with room.held(60):
        fits = start(CLAIM, tmp_path, 30)
        assert first_line(fits) == "held"
        fits.kill()
        fits.communicate()  # a claim ends with its process
        waits = start(CLAIM, tmp_path, 50)
        with pytest.raises(subprocess.TimeoutExpired):
            waits.wait(0.5)
        assert not (tmp_path / str(waits.pid)).exists()
    assert first_line(waits) == "held"
    waits.kill()
    waits.communicate()


def test_a_claim_above_all_there_is_waits_only_for_others(tmp_path: Path) -> None:
    with Room(tmp_path, 100).held(500):
        assert (tmp_path / str(os.getpid())).read_text() == "500"
    assert not (tmp_path / str(os.getpid())).exists()
    with Room(tmp_path, None).held(500):  # a host
        assert not (tmp_path / str(os.getpid())).exists()


def test_processes_need_their_peaks_what_the_allocator_keeps_and_a_context() -> None:
    expected = device_room.SEGMENTS * 3_000 + 2 * CONTEXT_BYTES
    assert needed([1_000, 2_000]) == pytest.approx(expected)
