"""`stepscope serve` with many run folders and several clients: list time, memory, answers a second.

python benchmarks/serve_load.py [--runs 1000] [--clients 10] [--seconds 10]

The folders are generated: small files as `stepscope run` leaves them, and one small trace each.
The server is a process of its own. It is killed once (SIGKILL) and started again, to see that the
list is there at once and complete.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median, quantiles

import httpx

TRACE = Path(__file__).parent.parent / "tests/golden/cpu_step.json.gz"
TOKEN = "benchmark-of-serve-load"
SCRIPTS = ("train.py", "finetune.py", "pretrain.py", "eval.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the clients ask")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root, cache = Path(name) / "runs", Path(name) / "cache"
        for number in range(chosen.runs):
            write_run(root / f"20260101-{number:06d}-train", number)
        measure(root, cache, chosen.clients, chosen.seconds, chosen.runs)


def write_run(folder: Path, number: int) -> None:
    chance = random.Random(number)
    rank = folder / "rank-00000"
    rank.mkdir(parents=True)
    script = SCRIPTS[number % len(SCRIPTS)]
    began = 1_790_000_000.0 + 600 * number
    run = {
        "schema": 1,
        "command": ["python", script],
        "folder": "/home/me/project",
        "started_unix": began,
        "status": "finished",
        "exit_code": 0 if number % 17 else 1,
        "ended_unix": began + 300,
        "world_size": 1,
    }
    (folder / "run.json").write_text(json.dumps(run))
    facts = {"schema": 1, "rank": 0, "world_size": 1, "status": "finished", "problems": []}
    (rank / "rank.json").write_text(json.dumps(facts | {"device": "NVIDIA H200", "steps": 60}))
    step_ms = 100 * (1.2 if number > 700 else 1.0)
    lines = [
        {"step": step, "wall_ns": round(1e6 * chance.gauss(step_ms, 2)), "window": False}
        for step in range(60)
    ]
    (rank / "steps.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    shutil.copy(TRACE, rank / "trace.json.gz")


class Server:
    """One `stepscope serve`."""

    def __init__(self, root: Path, cache: Path) -> None:
        own = {"STEPSCOPE_CACHE_DIR": str(cache), "STEPSCOPE_TAGS": str(cache / "tags")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stepscope", "serve", str(root), "--port", "0"],
            env=os.environ | own | {"STEPSCOPE_SERVE_TOKEN": TOKEN},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        found = re.search(r"http://[\d.:]+", self.process.stdout.readline())
        assert found is not None, "serve did not start"
        self.address = found[0]

    def client(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.address, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60
        )

    def memory_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1000

    def most_memory_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1000


def measure(root: Path, cache: Path, clients: int, seconds: float, runs: int) -> None:
    began = time.monotonic()
    server = Server(root, cache)
    try:
        with server.client() as client:
            print(f"started                      {time.monotonic() - began:8.2f} s")
            known = wait_for(client, runs, lambda row: row["state"] is not None)
            print(f"{known} runs with step times   {time.monotonic() - began:8.2f} s")
            alone = [timed_list(client) for _ in range(20)]
            print(f"list, one client, median     {median(alone):8.3f} s")
        print_load(server, clients, seconds)
        print(f"memory of serve              {server.memory_mb():8.1f} MB")
        print(f"memory of serve, the most    {server.most_memory_mb():8.1f} MB")
    finally:
        server.process.kill()
        server.process.wait()
    again = time.monotonic()
    server = Server(root, cache)
    try:
        with server.client() as client:
            rows = client.get("/runs.json").json()["runs"]
            complete = sum(row["step_ms"] is not None for row in rows)
            took = time.monotonic() - again
            print(f"killed, started again        {took:8.2f} s, {complete} runs with step times")
    finally:
        server.process.terminate()
        server.process.wait()


def wait_for(client: httpx.Client, runs: int, is_known) -> int:  # type: ignore[no-untyped-def]
    for _ in range(2400):
        rows = client.get("/runs.json").json()["runs"]
        if len(rows) == runs and all(map(is_known, rows)):
            break
        time.sleep(0.25)
    return sum(map(is_known, rows))


def timed_list(client: httpx.Client) -> float:
    began = time.monotonic()
    answer = client.get("/", params={"sort": "step_ms"})
    assert answer.status_code == 200
    return time.monotonic() - began


def print_load(server: Server, clients: int, seconds: float) -> None:
    times: list[float] = []
    end = time.monotonic() + seconds

    def browse() -> None:
        with server.client() as client:
            while time.monotonic() < end:
                times.append(timed_list(client))

    threads = [threading.Thread(target=browse) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slowest = quantiles(times, n=20)[-1]
    print(
        f"list, {clients} clients, median    {median(times):8.3f} s, "
        f"95th percentile {slowest:.3f} s"
    )
    print(f"lists a second               {len(times) / seconds:8.1f}")


if __name__ == "__main__":
    main()
