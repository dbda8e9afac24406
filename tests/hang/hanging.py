"""A small training that hangs as it is told: hanging.py KIND RANKS [spawn].

The line that hangs ends in `# here: KIND`. `hung-at` in the working directory is touched just
before. Each kind begins at step AT of the rank that is at fault.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
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
    plant = globals().get(f"read_{KIND.replace('-', '_')}")
    if plant is not None:
        plant()


def read_sleeps() -> None:
    hangs()
    time.sleep(1000)  # here: sleeps


def read_loop() -> None:
    hangs()
    count = 0
    while count >= 0:
        count += 1  # here: loop


def read_pipe() -> None:
    reading, _writing = os.pipe()
    hangs()
    os.read(reading, 1)  # here: pipe


def read_flock() -> None:
    Path("lock").touch()
    with Path("lock").open() as first, Path("lock").open() as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        hangs()
        fcntl.flock(second, fcntl.LOCK_EX)  # here: flock


def read_lock() -> None:
    lock = threading.Lock()
    threading.Thread(target=_hold, args=(lock,), daemon=True).start()
    time.sleep(0.2)
    hangs()
    with lock:  # here: lock
        pass


def read_two_locks() -> None:
    one, two = threading.Lock(), threading.Lock()
    with one:
        threading.Thread(target=_take_both, args=(two, one), daemon=True).start()
        time.sleep(0.2)
        hangs()
        two.acquire()  # here: two-locks


def read_killed() -> None:
    _keep_sockets()
    hangs()
    os.kill(os.getpid(), signal.SIGKILL)


def read_crashes() -> None:
    _keep_sockets()
    hangs()
    ctypes.string_at(0)


def read_aborts() -> None:
    """As C++ does: no exception of Python's, but a line before."""
    _keep_sockets()
    sys.stderr.write(f"terminate called: the last words of rank {FAULTY}\n")
    sys.stderr.flush()
    hangs()
    os.abort()


def read_raised() -> None:
    _keep_sockets()
    hangs()
    raise ValueError("a bad sample")  # here: raised


def read_leaves() -> None:
    _keep_sockets()
    hangs()
    sys.exit(0)


def read_stopped() -> None:
    hangs()
    os.kill(os.getpid(), signal.SIGSTOP)


def read_holds_python() -> None:
    """The regular expression takes longer than anybody waits, and lets no other thread run."""
    hangs()
    re.match("(a+)+$", "a" * 60 + "b")  # here: holds-python


def read_queue() -> None:
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
            elif KIND in ("worker-slow", "own-loader-slow"):
                until = time.monotonic() + LONG_S
                while time.monotonic() < until:
                    sum(range(1000))
            elif KIND == "worker-reads":
                pause_slow_disk(torch.nn.Module(), time.monotonic() + LONG_S)
        return torch.ones(16)


def _begin_slowly(_worker: int) -> None:
    time.sleep(LONG_S)


def batches(rank: int):
    if KIND.startswith(("worker", "own-loader")):
        workers = 1 if KIND.startswith("worker") else 0
        yield from enumerate(torch.utils.data.DataLoader(Samples(rank), 8, num_workers=workers))
    elif KIND == "epochs":
        for epoch in range(2):
            begin = _begin_slowly if epoch and rank == FAULTY else None
            data = range(4 * STEPS)
            loader = torch.utils.data.DataLoader(data, 8, num_workers=1, worker_init_fn=begin)
            for step, _batch in enumerate(loader, epoch * len(loader)):
                yield step, torch.ones(8, 16)
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
    elif KIND == "cut-link" and rank == FAULTY:
        hangs()
        subprocess.run(os.environ["CUT"].split(), check=True)


def pause(rank: int, step: int, model: torch.nn.Module) -> None:
    """Healthy, but long: on one rank, or with -all on each."""
    if step == AT and (rank == FAULTY or KIND.endswith("-all")):
        name = KIND.removesuffix("-all").replace("-", "_")
        long_work = globals().get(f"pause_{name}")
        if long_work is not None:
            Path("pauses").write_text(str(os.getpid()))
            long_work(model, time.monotonic() + LONG_S)


def pause_evaluates(model: torch.nn.Module, until: float) -> None:
    model.eval()
    with torch.no_grad():
        while time.monotonic() < until:
            model(torch.ones(8, 16))
    model.train()


def pause_evaluates_a_loader(model: torch.nn.Module, until: float) -> None:
    """No eval(): only batches that are fetched without gradients."""
    with torch.inference_mode():
        for batch in torch.utils.data.DataLoader(range(100_000), 8):
            getattr(model, "module", model)(batch.float().repeat(2))
            if time.monotonic() > until:
                break


@torch.no_grad()
def pause_estimates(model: torch.nn.Module, until: float) -> None:
    while time.monotonic() < until:
        model(torch.ones(8, 16))


class SlowToSave:
    def __reduce__(self) -> tuple[type, tuple[()]]:
        time.sleep(LONG_S)
        return (dict, ())


def pause_saves(model: torch.nn.Module, until: float) -> None:
    torch.save(SlowToSave(), "checkpoint.pt")


def pause_pickles(model: torch.nn.Module, until: float) -> None:
    with Path(f"checkpoint-{os.getpid()}").open("wb") as file:
        pickle.dump(SlowToSave(), file)


def pause_slow_disk_writes(model: torch.nn.Module, until: float) -> None:
    """A checkpoint in a format of one's own, on a disk of 4 MB/s."""
    with Path(f"own-format-{os.getpid()}").open("wb") as file:
        while time.monotonic() < until:
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())
            time.sleep(0.25)


def pause_slow_disk(model: torch.nn.Module, until: float) -> None:
    data = Path(f"data-{os.getpid()}")
    data.write_bytes(bytes(8 << 20))
    with data.open("rb", buffering=0) as file:
        while time.monotonic() < until:
            file.seek(0)
            file.read(1 << 20)
            time.sleep(0.1)


def pause_bursts(model: torch.nn.Module, until: float) -> None:
    """A disk that many share: 4 MB every two seconds."""
    data = Path(f"data-{os.getpid()}")
    data.write_bytes(bytes(4 << 20))
    while time.monotonic() < until:
        data.read_bytes()
        time.sleep(2)


def pause_swaps(model: torch.nn.Module, until: float) -> None:
    """Each page that is touched comes from the disk, as swapped memory does."""
    with Path(f"swapped-{os.getpid()}").open("w+b") as file:
        file.truncate(16 << 20)
        with mmap.mmap(file.fileno(), 0) as memory:
            memory.write(bytes(len(memory)))
            memory.flush()
            memory.madvise(mmap.MADV_RANDOM)
            while time.monotonic() < until:
                memory.madvise(mmap.MADV_DONTNEED)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                for start in range(0, len(memory), 64 << 10):
                    memory[start]
                    time.sleep(0.005)


def pause_compiles(model: torch.nn.Module, until: float) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        while time.monotonic() < until:
            sum(range(1000))
        return graph.forward

    torch.compile(torch.nn.Linear(16, 4), backend=backend)(torch.ones(8, 16))


def pause_compiles_elsewhere(model: torch.nn.Module, until: float) -> None:
    """The compiler is another program."""

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        subprocess.run(["sleep", str(LONG_S)], check=True)
        return graph.forward

    torch.compile(torch.nn.Linear(16, 4), backend=backend)(torch.ones(8, 16))


def pause_inductor(model: torch.nn.Module, until: float) -> None:
    torch.compile(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(9))))(
        torch.ones(8, 16)
    ).sum().backward()


def pause_program(model: torch.nn.Module, until: float) -> None:
    """It counts a score, or builds an extension."""
    busy = f"import time\nwhile time.monotonic() < {until}: pass"
    subprocess.run([sys.executable, "-S", "-c", busy], check=True)


def pause_breakpoint(model: torch.nn.Module, until: float) -> None:
    breakpoint()


def pause_held(model: torch.nn.Module, until: float) -> None:
    time.sleep(1.0)  # whoever started it attaches a debugger, or suspends all, meanwhile


pause_suspended = pause_held


def pause_paused(model: torch.nn.Module, until: float) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


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
