"""The command leaves at once: its code, its output and its exit handlers are as at any end."""

from __future__ import annotations

import subprocess
import sys

import pytest

LEAVING = """
import atexit, sys
from stepscope import __main__ as command
def verb():
    atexit.register(print, "handler")
    sys.stdout.write("answer ")
    sys.exit({code})
command.main = verb
{before}
command.run()
"""
THREAD = """
import threading, time
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
"""


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize(("before", "says"), [("", "answer handler"), (THREAD, "answer thread")])
def test_nothing_is_lost(code: int, before: str, says: str) -> None:
    script = LEAVING.format(code=code, before=before)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith(says)
    assert done.stdout.endswith("handler\n")
    assert done.stderr == ""
