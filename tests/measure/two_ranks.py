"""Start a small gloo job of real processes and collect what each rank has to say.

Importing torch is most of what such a job costs, so one process does it once and every rank of
every job is forked from it. Run as a script, this file is that process: one job a line.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"
TIMEOUT_S = 50
BEFORE = """
import json, os, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, answer = int(sys.argv[1]), {}
"""
JOIN = """
dist.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=2)
"""
AFTER = """
with open(sys.argv[2], "w") as file:
    json.dump(answer, file)
if dist.is_initialized():
    dist.destroy_process_group()
"""


def run_ranks(
    folder: Path, body: str, *, before: str = "", method: str | None = None
) -> list[dict[str, Any] | None]:
    """Both ranks' `answer` and output; None for a rank that ended without an answer.

    Some versions of torch write a line for each gloo group; those lines are left out.
    """
    script = folder / "rank.py"
    script.write_text(BEFORE + textwrap.dedent(before) + JOIN + textwrap.dedent(body) + AFTER)
    method = method or f"file://{folder / 'store'}"
    answers = [folder / f"answer-{rank}.json" for rank in range(2)]
    job = [[str(script), str(rank), str(answers[rank]), method] for rank in range(2)]
    server = _server()
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    assert server.stdout.readline() == "done\n"
    said = [_without_gloo(path.with_suffix(".txt").read_text()) for path in answers]
    found = [json.loads(path.read_text()) if path.exists() else None for path in answers]
    assert any(found), "\n".join(itertools.chain(*said))
    return [
        answer and {**answer, "output": lines} for answer, lines in zip(found, said, strict=True)
    ]


def _without_gloo(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("[Gloo]")]


@functools.cache
def _server() -> Any:
    server = subprocess.Popen(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path[1:]])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def close() -> None:
        server.stdin.close()
        server.stdout.close()
        server.wait(timeout=10)

    atexit.register(close)
    return server


def _serve() -> None:
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401 - DDP and fully_shard would import both

    for line in sys.stdin:
        ranks = [_fork(arguments) for arguments in json.loads(line)]
        for rank in ranks:
            os.waitpid(rank, 0)
        sys.stdout.write("done\n")
        sys.stdout.flush()


def _fork(arguments: list[str]) -> int:
    child = os.fork()
    if child:
        return child
    signal.alarm(TIMEOUT_S)
    with Path(arguments[2]).with_suffix(".txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.argv = arguments
    try:
        code = compile(Path(arguments[0]).read_text(), arguments[0], "exec")
        exec(code, {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(0)


if __name__ == "__main__":
    _serve()
