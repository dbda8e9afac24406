"""start_ranks.py RANKS SCRIPT ARGUMENTS...: processes that find their ranks in the environment.

As a cluster's launcher starts them; unlike torchrun it imports no torch, which takes seconds.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def main(ranks: int, command: list[str]) -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen(
            [sys.executable, "-u", *command],
            env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    codes = []
    for process in started:
        codes.append(process.wait())
        if codes[-1]:  # the others would wait for it
            for other in started:
                other.terminate()
    return next((abs(code) for code in codes if code), 0)


sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
