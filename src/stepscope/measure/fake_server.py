"""Runs scripts with fake tensors, each in a fork of one process that has imported torch already.

python -c "...; main()"

Every line of its input names a file with a FakeRequest (JSON). It answers with the process id of
the fork, which leads a process group of its own, and with `ended` when that is gone. It ends with
its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from stepscope.measure.fake_step import FakeRequest, answer

ENDED = "ended"


def main() -> None:
    _import_torch()
    protocol = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            os.close(protocol)
            _answer_alone(line.rstrip("\n"))
        os.write(protocol, f"{child}\n".encode())
        os.waitpid(child, 0)
        os.write(protocol, f"{ENDED}\n".encode())


def _import_torch() -> None:
    """All that takes long, but no backward pass: its threads would not survive a fork."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).relu()


def _answer_alone(file: str) -> NoReturn:
    """In the fork: nothing that the script prints or reads is the server's."""
    try:
        os.setsid()
        request = FakeRequest(**json.loads(Path(file).read_bytes()))
        os.chdir(request.cwd)
        _redirect(os.devnull, os.O_RDONLY, 0)
        _redirect(os.devnull, os.O_WRONLY, 1)
        _redirect(request.errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 2)
        signal.setitimer(signal.ITIMER_REAL, request.limit_s)  # also if nobody waits any more
        answer(request)
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(1)


def _redirect(file: str, flags: int, descriptor: int) -> None:
    opened = os.open(file, flags, 0o600)
    os.dup2(opened, descriptor)
    os.close(opened)
