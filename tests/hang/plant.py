"""Run a planted hang under `stepscope run`, and say whether the answer names rank and line."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("hanging.py")
SPAWN, TORCHRUN, ALONE, TWO_HOSTS = "spawn", "torchrun", "alone", "two-hosts"
AFTER_S = 3.0
LIMIT_S, PAUSED_S = 120.0, 15.0
MARK = "PLANTED_IN"  # in the environment of all processes of one hang


@dataclass(frozen=True)
class Plant:
    """One planted hang: who is at fault, and what the answer may call it."""

    kind: str
    answers: tuple[str, ...]
    ranks: int = 2
    launcher: str = SPAWN
    line: str | None = None  # None: no line is known; else the mark of the line
    faulty: tuple[int, ...] | None = None  # None: the last rank
    says: str = ""  # is in the verdict, or in the last lines of stderr

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.ranks}-{self.launcher}"

    @property
    def at_fault(self) -> tuple[int, ...]:
        return (self.ranks - 1,) if self.faulty is None else self.faulty


def _line(kind: str) -> int:
    lines = SCRIPT.read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"# here: {kind}"))


def _here(kind: str, *answers: str, **more: Any) -> Plant:
    return Plant(kind, answers, line=kind, **more)


HANGS = (
    _here("sleeps", "missing"),
    _here("sleeps", "missing", ranks=4, launcher=TORCHRUN),
    _here("sleeps", "blocked", ranks=1, launcher=ALONE),
    _here("loop", "missing", launcher=TORCHRUN),
    _here("loop", "loop", ranks=1, launcher=ALONE),
    _here("pipe", "missing", ranks=3),
    _here("flock", "missing"),
    _here("lock", "deadlock"),
    _here("two-locks", "deadlock", launcher=TORCHRUN),
    _here("queue", "deadlock", "blocked", "missing"),
    Plant("killed", ("ended",), ranks=3, says="killed by SIGKILL"),
    Plant("crashes", ("ended",), says="killed by SIGSEGV"),
    Plant("aborts", ("ended",), ranks=3, says="the last words of rank 2"),
    _here("raised", "ended"),
    Plant("leaves", ("ended",), launcher=TORCHRUN),
    Plant("stopped", ("stopped",), launcher=TORCHRUN),
    Plant("stopped", ("stopped",), ranks=1, launcher=ALONE),
    Plant("holds-python", ("blocked",)),
    _here("worker-sleeps", "loader"),
    _here("worker-lock", "loader", ranks=1, launcher=ALONE),
    Plant("worker-stopped", ("loader",), launcher=TORCHRUN),
    _here("own-loader", "missing"),
    _here("skips", "mismatch", faulty=(0, 1)),
    _here("different", "mismatch", ranks=3, launcher=TORCHRUN),
    _here("two-groups", "deadlock", faulty=(0, 1)),
    _here("receives", "missing", "unknown"),
    _here("waits-later", "missing", "unknown", launcher=TORCHRUN),
    _here("never-starts", "missing", launcher=TORCHRUN),
    _here("never-starts", "missing", ranks=3),
    Plant("cut-link", ("unreachable",), launcher=TWO_HOSTS, faulty=(0, 1)),
)
HEALTHY = (
    *("evaluates", "evaluates-all", "evaluates-a-loader", "estimates"),
    *("saves", "saves-all", "pickles", "slow-disk-writes", "slow-disk-writes-all"),
    *("slow-disk", "slow-disk-all", "bursts", "bursts-all", "swaps", "swaps-all"),
    *("compiles", "compiles-all", "compiles-elsewhere", "inductor", "inductor-all", "program"),
    *("worker-slow", "worker-reads", "epochs", "writes-afterwards", "nothing"),
    *("breakpoint", "held", "suspended"),
)


@dataclass(frozen=True)
class Outcome:
    """What `run` and `hang` said."""

    said: str | None  # by `run`, the first sentence
    after_s: float | None  # from the hang to that sentence
    answer: dict[str, Any]
    errors: str

    def is_right(self, plant: Plant) -> bool:
        where = self.answer.get("where") or {}
        here = plant.line is None or _line(plant.line)
        right_line = here is True or where.get("line") in (here, here - (plant.kind == "loop"))
        right_ranks = tuple(self.answer.get("ranks", ())) == plant.at_fault
        words = (self.answer.get("verdict", ""), *self.answer.get("last_lines", ()))
        is_right = right_line and right_ranks and any(plant.says in line for line in words)
        return is_right and self.answer.get("kind") in plant.answers


def command(kind: str, ranks: int, launcher: str) -> list[str]:
    words = [str(SCRIPT), kind, str(ranks)]
    if launcher == TORCHRUN:
        options = ["--nproc-per-node", str(ranks), "--master-port", str(_free_port())]
        return [sys.executable, "-m", "torch.distributed.run", *options, *words]
    return [sys.executable, *words, *([SPAWN] if launcher == SPAWN else [])]


def _free_port() -> int:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return int(asking.getsockname()[1])


def start(words: list[str], folder: Path, *options: str, after_s: float) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    run = [sys.executable, "-m", "stepscope", "run", "--out", "run", "--no-explain"]
    run += ["--wait", "100000", "--no-memory"]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as errors:
        return subprocess.Popen(
            [*run, "--hang-after", f"{after_s}s", *options, "--", *words],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=errors,
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "MASTER_PORT": str(_free_port()),
                MARK: str(folder),
            },
        )


def processes_of(folder: Path) -> list[int]:
    """Launchers give their workers sessions of their own; the environment stays."""
    mark = f"{MARK}={folder}".encode()
    pids = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (place / "environ").read_bytes().split(b"\0"):
                pids.append(int(place.name))
    return pids


def end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """All its processes, stopped ones as well."""
    for pid in processes_of(folder):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.wait(10)
    if process.stdin is not None:
        process.stdin.close()


def play(
    plant: Plant, folder: Path, *, after_s: float = AFTER_S, options: tuple[str, ...] = ()
) -> Outcome:
    """Until `run` says who hangs; then `hang` is asked, while the job still hangs."""
    if plant.kind == "never-starts":
        after_s = 1.0
    if plant.launcher == TWO_HOSTS:
        hosts = _two_hosts(f"{os.getpid()}{next(_NUMBERS)}")
        words = command(plant.kind, plant.ranks, ALONE)
        words = ["sh", "-c", f"{_on_host(hosts, 0, words)} & {_on_host(hosts, 1, words)}; wait"]
    else:
        hosts, words = (), command(plant.kind, plant.ranks, plant.launcher)
    process = start(words, folder, *options, after_s=after_s)
    try:
        until = time.monotonic() + LIMIT_S
        said = None
        while said is None and time.monotonic() < until and process.poll() is None:
            time.sleep(0.1)
            said = sentence(folder)
        took = time.time() - (folder / "hung-at").stat().st_mtime if said else None
        return Outcome(said, took, ask(folder), (folder / "err").read_text()[-2000:])
    finally:
        end(process, folder)
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], check=False)


_NUMBERS = itertools.count()


def has_namespaces() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None


def _two_hosts(name: str) -> tuple[str, str]:
    """Two network namespaces with a link between them, named like their ends of it."""
    a, b = f"h{name}a", f"h{name}b"
    added = (
        *(f"netns add {host}" for host in (a, b)),
        f"link add {a} netns {a} type veth peer name {b} netns {b}",
        *(f"-n {host} addr add 10.77.0.{n}/24 dev {host}" for n, host in ((1, a), (2, b))),
        *(f"-n {host} link set {link} up" for host in (a, b) for link in ("lo", host)),
    )
    for words in added:
        subprocess.run(["ip", *words.split()], check=True)
    return a, b


def _on_host(hosts: tuple[str, ...], rank: int, words: list[str]) -> str:
    cut = f"ip -n {hosts[-1]} link set {hosts[-1]} down"
    host = hosts[rank]
    env = f"RANK={rank} WORLD_SIZE=2 MASTER_ADDR=10.77.0.1 GLOO_SOCKET_IFNAME={host}"
    return f"CUT='{cut}' {env} ip netns exec {host} {shlex.join(words)}"


def sentence(folder: Path) -> str | None:
    text = (folder / "err").read_text(errors="replace")
    return next((line for line in text.splitlines() if "More: stepscope hang" in line), None)


def ask(folder: Path) -> dict[str, Any]:
    words = [sys.executable, "-m", "stepscope", "hang", "run", "--json"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    answer: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"kind": done.stderr}
    return answer


def play_healthy(kind: str, folder: Path, *, ranks: int = 2) -> Outcome:
    """To its end. What a person would do meanwhile, a debugger's user for one, is done here."""
    launcher = TORCHRUN if ranks > 1 else ALONE
    process = start(command(kind, ranks, launcher), folder, after_s=AFTER_S)
    try:
        until = time.monotonic() + LIMIT_S
        act = ACTS.get(kind)
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.2)
            if act is not None and (folder / "pauses").exists():
                act(process, folder)
                act = None
        assert process.poll() == 0, (folder / "err").read_text()[-2000:]
        return Outcome(sentence(folder), None, ask(folder), (folder / "err").read_text()[-2000:])
    finally:
        end(process, folder)


def _type_continue(process: subprocess.Popen[bytes], folder: Path) -> None:
    time.sleep(PAUSED_S)
    assert process.stdin is not None
    process.stdin.write(b"c\n")
    process.stdin.flush()


def _hold(_process: subprocess.Popen[bytes], folder: Path) -> None:
    """gdb stops the process, and lets it go when it ends."""
    words = [
        "gdb",
        "-p",
        (folder / "pauses").read_text(),
        "-batch",
        "-ex",
        f"shell sleep {PAUSED_S}",
    ]
    subprocess.run(words, capture_output=True, check=True)


def _suspend(_process: subprocess.Popen[bytes], folder: Path) -> None:
    pids = processes_of(folder)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        time.sleep(PAUSED_S if number == signal.SIGSTOP else 0)


def _continue(_process: subprocess.Popen[bytes], folder: Path) -> None:
    time.sleep(2 * PAUSED_S)  # a rank that cannot record itself is told later
    os.kill(int((folder / "pauses").read_text()), signal.SIGCONT)


ACTS = {
    "breakpoint": _type_continue,
    "held": _hold,
    "suspended": _suspend,
    "paused": _continue,
}
