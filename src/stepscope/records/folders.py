"""Names and formats of files that capture writes and readers find: in a run folder, by which
host and process, and in this user's own folder. Standard library only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# What may end a step, as a user names it; under `watch` the script calls `step` (call).
STEP_ON = ("auto", "optimizer", "backward", "dataloader", "forward")

# A rank's list of steps on disk: steps.jsonl, and the packed parts that hold its older steps.
#
# A packed part is one gzip file of JSON: for each field a list with one number per step. Fields of
# lines that lack them are ABSENT. Three fields are stored as what the others do not already say:
# `step` as the distance to the previous step, `other_ns` as what the phases leave of the wall time,
# `end_unix_ns` as the time since the previous end that is no part of this step. Wall times are
# exact; a few parts of them lose digits that no measurement has (ROUNDED). Both ends of the
# program, capture and readers, take names and fields from here.
#
# Of short steps only some are noted in full. A line of a stretch of others has the number of its
# first step in `step`, how many they are in `steps`, and their wall times in `walls`: a letter of
# Python's array and base64 of little-endian numbers, in multiples of `unit`. Its other times are
# those of the whole stretch. Packed parts hold these lines as they are, in `stretches`.

STEPS_FILE = "steps.jsonl"
PACKED_SCHEMA = 1
ABSENT = -1
STEP, WALL, OTHER, END = "step", "wall_ns", "other_ns", "end_unix_ns"
# Without `other_ns`: that is what these leave of the wall time.
PHASE_FIELDS = (
    "data_ns",
    "forward_ns",
    "backward_ns",
    "optimizer_ns",
    "evaluation_ns",
    "checkpoint_ns",
    "gc_ns",
    "compile_ns",
    "between_epochs_ns",
    "unnoted_ns",
)
EXTRA_FIELDS = (
    "epoch_gap_ns",
    "device_ns",
    "elements",
    "allocated_bytes",
    "cpu_wait_ns",
    "major_faults",
    "retries",
    "graphs",
)
# Rounded down to a power of ten of at most 1 / ROUNDING of the step; `other_ns` gets the rest, so
# that phases still add up.
ROUNDED = frozenset((*PHASE_FIELDS[:4], "device_ns", "cpu_wait_ns"))
ROUNDING = 100_000
WALLS = "walls"
MARKS = ("window", "first", "last", "memory", "skipped", "host")
_PART = re.compile(r"steps-(\d{5})\.json\.gz")


def part_name(number: int) -> str:
    """Parts count from 1."""
    return f"steps-{number:05d}.json.gz"


def part_number(name: str) -> int | None:
    """Return None for a file that is no packed part."""
    match = _PART.fullmatch(name)
    return int(match[1]) if match else None


# A window that somebody asks a running job for: the files through which both sides talk.
#
# Whoever wants a window writes REQUEST into the run folder. The first rank that sees it chooses the
# steps and writes the plan; every rank records those steps.

REQUEST_FILE = "window-request.json"  # {"schema", "id", "asked_unix"}
REQUEST_SCHEMA = 1
REQUEST_ID = re.compile(r"[0-9a-f]{16}")


def plan_name(request: str) -> str:
    """{"schema", "id", "first", "warmup", "active", "refused"} for the request with this id."""
    return f"window-{request}.json"


def step_trace(first_active: int) -> str:
    """The trace of a window that has a file of its own."""
    return f"trace-step-{first_active}.json.gz"


# How a rank reports, among its problems, that a file of its folder could not be written.

TRACE = "trace.json.gz"
SAVING = "saving the trace"
_UNWRITTEN = re.compile(r"writing ([\w.]+): (.*)", re.DOTALL)


def writing(name: str) -> str:
    """Return what was tried; the reason follows it."""
    return SAVING if name == TRACE else f"writing {name}"


def unwritten_parts(problems: Iterable[object]) -> dict[str, str]:
    """File -> the reason why it could not be written."""
    reasons = {}
    for problem in problems:
        match = _UNWRITTEN.fullmatch(str(problem))
        if match:
            reasons[match[1]] = match[2]
        elif str(problem).startswith(f"{SAVING}: "):
            reasons[TRACE] = str(problem)[len(SAVING) + 2 :]
    return reasons


# Which process wrote a file, so that a later reader can see whether it still runs.
#
# Process numbers are reused: the start time, the boot and the namespace of the number distinguish
# processes. Linux reports all of them; unknown values are None.

State = Literal["running", "gone", "restarted", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """One process of one machine, from one boot to the next."""

    pid: int
    host: str
    started_ticks: int | None = None  # since the machine's start
    boot: str | None = None
    namespace: str | None = None  # of `pid`: containers have their own


def this_process() -> ProcessIdentity:
    """Never raises."""
    pid = os.getpid()
    return ProcessIdentity(
        pid=pid,
        host=os.uname().nodename,
        started_ticks=_started_ticks(pid),
        boot=_boot(),
        namespace=_namespace(),
    )


def process_state(process: ProcessIdentity) -> State:
    """Whether it runs now; "unknown" on another machine or in another container."""
    if process.host != os.uname().nodename or process.boot is None:
        return "unknown"
    if process.boot != _boot():
        return "restarted"
    if process.started_ticks is None or process.namespace != _namespace():
        return "unknown"
    return "running" if _started_ticks(process.pid) == process.started_ticks else "gone"


def is_alive(pid: int) -> bool:
    """Whether a process of this machine has this number and is not a zombie."""
    return _started_ticks(pid) is not None if Path("/proc/self/stat").exists() else True


def _started_ticks(pid: int) -> int | None:
    """Return None for a process that does not exist or has ended (a zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *numbers = text.rpartition(b")")[2].split()  # a name may hold brackets and spaces
    return None if state in (b"Z", b"X") else int(numbers[18])


def _boot() -> str | None:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def _namespace() -> str | None:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - not the path of a file
    return None


# The names of a job's hosts, and of the files about them in its run folder.

HOSTS = "hosts"  # the folder
_PROCESSES = ".processes.jsonl"


def this_host() -> str:
    return os.uname().nodename


# What a rank does while no step ends, and the request that makes all ranks say so at once.

HANG = "hang.json"  # in the rank's folder
HANG_REQUEST = "hang-request.json"  # in the run folder; only its time matters
_HOST_HANG = ".hang.json"


def host_hang_file(run: Path, host: str, pid: int | None = None) -> Path:
    """What a process writes before its first step ends; without `pid`, what `run` sees of all
    processes of this host from outside."""
    return run / HOSTS / f"{host}{f'.{pid}' if pid is not None else ''}{_HOST_HANG}"


def host_hang_files(run: Path, most: int) -> list[Path]:
    """Those of all hosts."""
    try:
        names = sorted(name for name in os.listdir(run / HOSTS) if name.endswith(_HOST_HANG))  # noqa: PTH208
    except OSError:
        return []
    return [run / HOSTS / name for name in names[:most]]


def processes_file(run: Path, host: str) -> Path:
    """Return how far each Python process of a host came. Hosts that share a disk append to no
    common file: network file systems lose lines of it."""
    return run / HOSTS / f"{host}{_PROCESSES}"


def processes_files(run: Path, most: int) -> list[Path]:
    """Those of this host and of some others."""
    own = processes_file(run, this_host())
    try:
        names = sorted(name for name in os.listdir(run / HOSTS) if name.endswith(_PROCESSES))  # noqa: PTH208
    except OSError:
        names = []
    return list(dict.fromkeys([own, *(run / HOSTS / name for name in names)]))[:most]


# Where a parameter server's records lie in the run folder.
#
# On its own because every reader of run folders needs it, and the records take long to import.

SERVER_FOLDER = "together"
SERVER_FILE = "server.json"
COORDINATOR_FILE = "coordinator.jsonl"


# Where stepscope keeps files of its own for this user, and under which host's name.


def user_folder(
    variable: str, name: str, base_variable: str = "XDG_CONFIG_HOME", usual: str = "~/.config"
) -> Path:
    """The folder that an environment variable names, else one in the user's configuration."""
    if chosen := os.environ.get(variable):
        return Path(chosen)
    try:
        base = Path(os.environ.get(base_variable) or Path(usual).expanduser())
    except RuntimeError:  # a user without a home, as in some containers
        import tempfile

        base = Path(tempfile.gettempdir())
    return base / "stepscope" / name


def node_name() -> str:
    """The name that files of this machine carry."""
    import platform

    return platform.node()
