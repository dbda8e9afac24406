"""A small training that hangs as it is told: hanging.py KIND RANKS [spawn].

The line that hangs ends in `# here: KIND`. `hung-at` in the working directory is touched just
before. Each kind begins at step AT of the rank that is at fault.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

AT, STEPS = 30, int(os.environ.get("STEPS", "60"))
LONG_S = 9.0  # of healthy pauses
KIND, RANKS = sys.argv[1], int(sys.argv[2])
FAULTY = RANKS - 1


def hangs() -> None:
    Path("hung-at").touch()


def read_batch(rank: int, step: int) -> torch.Tensor:
    if rank == FAULTY and step == AT:
        _plant_in_reading()
    return torch.ones(8, 16) * (rank + 1)


def _plant_in_reading() -> None:
    plant = READING.get(KIND)
    if plant is not None:
        plant()


def _sleep() -> None:
    hangs()
    time.sleep(1000)  # here: sleeps


def _loop() -> None:
    hangs()
    count = 0
    while count >= 0:
        count += 1  # here: loop


def _read_pipe() -> None:
    reading, _writing = os.pipe()
    hangs()
    os.read(reading, 1)  # here: pipe


def _lock_file() -> None:
    Path("lock").touch()
    with Path("lock").open() as first, Path("lock").open() as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        hangs()
        fcntl.flock(second, fcntl.LOCK_EX)  # here: flock


def _take_held_lock() -> None:
    lock = threading.Lock()
    threading.Thread(target=_hold, args=(lock,), daemon=True).start()
    time.sleep(0.2)
    hangs()
    with lock:  # here: lock
        pass


def _take_locks_in_turn() -> None:
    one, two = threading.Lock(), threading.Lock()
    with one:
        threading.Thread(target=_take_both, args=(two, one), daemon=True).start()
        time.sleep(0.2)
        hangs()
        two.acquire()  # here: two-locks


def _die() -> None:
    _keep_sockets()
    hangs()
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    _keep_sockets()
    hangs()
    raise ValueError("a bad sample")  # here: raised


def _leave() -> None:
    _keep_sockets()
    hangs()
    sys.exit(0)


def _stop() -> None:
    hangs()
    os.kill(os.getpid(), signal.SIGSTOP)


def _match() -> None:
    """The regular expression takes longer than anybody waits, and lets no other thread run."""
    hangs()
    re.match("(a+)+$", "a" * 60 + "b")  # here: holds-python


def _wait_for_dead_child() -> None:
    items: multiprocessing.Queue[int] = multiprocessing.Queue()
    child = multiprocessing.Process(target=time.sleep, args=(0,))
    child.start()
    hangs()
    items.get()  # here: queue


def _keep_sockets() -> None:
    """A forked child, as a loader's worker is, keeps the rank's connections open after its end."""
    if os.fork() == 0:
        time.sleep(1000)
        os._exit(0)


def _hold(lock: threading.Lock) -> None:
    with lock:
        time.sleep(1000)


def _take_both(first: threading.Lock, second: threading.Lock) -> None:
    with first:
        second.acquire()


READING = {
    "sleeps": _sleep,
    "loop": _loop,
    "pipe": _read_pipe,
    "flock": _lock_file,
    "lock": _take_held_lock,
    "two-locks": _take_locks_in_turn,
    "killed": _die,
    "raised": _raise,
    "leaves": _leave,
    "stopped": _stop,
    "holds-python": _match,
    "queue": _wait_for_dead_child,
}


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, number: int) -> torch.Tensor:
        if self.rank == FAULTY and number == 8 * AT:
            if KIND == "worker-sleeps":
                hangs()
                time.sleep(1000)  # here: worker-sleeps
            elif KIND == "worker-stopped":
                hangs()
                os.kill(os.getpid(), signal.SIGSTOP)
            elif KIND == "worker-lock":
                lock = threading.Lock()
                lock.acquire()
                hangs()
                lock.acquire()  # here: worker-lock
            elif KIND == "own-loader":
                hangs()
                time.sleep(1000)  # here: own-loader
        return torch.ones(16)


def batches(rank: int):
    if KIND.startswith("worker") or KIND == "own-loader":
        workers = 1 if KIND.startswith("worker") else 0
        yield from enumerate(torch.utils.data.DataLoader(Samples(rank), 8, num_workers=workers))
    else:
        for step in range(STEPS):
            yield step, read_batch(rank, step)


def exchange(rank: int, step: int, groups: list[dist.ProcessGroup]) -> None:
    """Collectives of the script's own."""
    if step != AT or RANKS < 2:
        return
    value = torch.ones(4)
    if KIND == "skips":
        hangs()
        if rank != FAULTY:
            dist.barrier()  # here: skips
    elif KIND == "different":
        hangs()
        if rank == FAULTY:
            dist.broadcast(value, 0)  # here: different
        else:
            dist.all_reduce(value)
    elif KIND == "two-groups":
        hangs()
        if rank == FAULTY:
            dist.all_reduce(value, group=groups[1])
            dist.all_reduce(value, group=groups[0])
        else:
            dist.all_reduce(value, group=groups[0])  # here: two-groups
            dist.all_reduce(value, group=groups[1])
    elif KIND == "receives" and rank == FAULTY:
        hangs()
        dist.recv(value, 0)  # here: receives
    elif KIND == "waits-later" and rank == FAULTY:
        work = dist.irecv(value, 0)
        hangs()
        work.wait()  # here: waits-later


def pause(rank: int, step: int, model: torch.nn.Module) -> None:
    """Healthy, but long."""
    if step != AT or (rank != FAULTY and not KIND.endswith("-all")):
        return
    kind = KIND.removesuffix("-all")
    until = time.monotonic() + LONG_S
    if kind == "evaluates":
        model.eval()
        with torch.no_grad():
            while time.monotonic() < until:
                model(torch.ones(8, 16))
        model.train()
    elif kind == "saves":
        torch.save(SlowToSave(), "checkpoint.pt")
    elif kind == "slow-disk":
        data = Path("data")
        data.write_bytes(bytes(8 << 20))
        with data.open("rb", buffering=0) as file:
            while time.monotonic() < until:
                file.seek(0)
                file.read(1 << 20)
                time.sleep(0.1)
    elif kind == "paused":  # by a debugger, which goes on later
        os.kill(os.getpid(), signal.SIGSTOP)


class SlowToSave:
    def __reduce__(self) -> tuple[type, tuple[()]]:
        time.sleep(LONG_S)
        return (dict, ())


def train(rank: int, *_: object) -> None:
    if rank == FAULTY and KIND == "never-starts":
        torch.nn.Linear(1, 1)
        hangs()
        time.sleep(1000)  # here: never-starts
    torch.manual_seed(0)
    if RANKS > 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    groups = [dist.new_group(list(range(RANKS))) for _ in range(2)] if RANKS > 1 else []
    model: torch.nn.Module = torch.nn.Linear(16, 4)
    if RANKS > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in batches(rank):
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        exchange(rank, step, groups)
        pause(rank, step, model)
        time.sleep(0.02)
        sys.stdout.write(f"loss {rank} {step} {loss.item().hex()}\n")
    if KIND == "writes-afterwards":
        until = time.monotonic() + LONG_S
        while time.monotonic() < until:
            sum(range(1000))


def spawn() -> None:
    """Processes that nobody ends when one of them dies."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=train, args=(rank,)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    if "spawn" in sys.argv:
        spawn()
    else:
        train(int(os.environ.get("RANK", "0")))
