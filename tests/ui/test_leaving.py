"""The command ends like any program: exit handlers run, nothing that was printed is lost."""

from __future__ import annotations

import subprocess
import sys

import pytest

LEAVING = """
import atexit, sys, threading, time
from stepscope.__main__ import run
atexit.register(print, "handler")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
sys.argv = ["stepscope", "{verb}"]
run()
"""


@pytest.mark.parametrize(("verb", "code"), [("--version", 0), ("explian", 2)])
def test_nothing_is_lost(verb: str, code: int) -> None:
    script = LEAVING.format(verb=verb)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stdout.endswith("thread\nhandler\n")
