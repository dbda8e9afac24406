"""Find which job this `stepscope run` belongs to, from schedulers' variables and launchers'
options, so that several share one run folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from stepscope.errors import UnreadableInputError
from stepscope.measure.folder import script_slug
from stepscope.trace.files import read_start
from stepscope.ui.jobs.environment import DEEPSPEED, SCRIPT

if TYPE_CHECKING:
    Environment = Mapping[str, str]

# What a launcher's command line says about its job: how many hosts, which one, where they meet.

_TORCH_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_HOSTS = re.compile(r"(\d{1,6})(?::(\d{1,6}))?")
_ANY_HOSTS = (1, 1_000_000)  # a file lists them
_MOST_BYTES = 100_000
_CONFIGURED = re.compile(
    r"^(?P<name>num_machines|machine_rank|main_process_ip|main_process_port):[ \t]*"
    r"(?P<value>[^\s#]*)",
    re.MULTILINE,
)


def _launcher(command: Sequence[str], environment: Environment) -> JobKey | None:
    """The command is a launcher that runs on every host: torchrun --nnodes=2, accelerate."""
    for place, word in enumerate(command):
        name = PurePath(word).name
        if name == "torchrun" or word in _TORCH_MODULES:
            return _torchrun(_given(command[place + 1 :]), environment)
        if name == "accelerate" and "launch" in command[place + 1 : place + 2]:
            return _accelerate(_given(command[place + 2 :]), environment)
        if name == "accelerate-launch" or word == "accelerate.commands.launch":
            return _accelerate(_given(command[place + 1 :]), environment)
        if name in DEEPSPEED:
            # Only with --no_ssh does every host run it; else the first host starts the others.
            given = _given(command[place + 1 :])
            if "no_ssh" not in given:
                return None
            return _over_hosts(
                "deepspeed",
                hosts=_hosts(given.get("num_nodes")) or _ANY_HOSTS,
                place=_whole(given.get("node_rank")),
                meeting=(given.get("master_addr"), given.get("master_port")),
            )
    return None


def _given(words: Sequence[str]) -> dict[str, str]:
    """Options before the script; --node-rank and --node_rank are one. Flags have an empty value."""
    options: dict[str, str] = {}
    last: str | None = None
    for word in words:
        if last is None and (SCRIPT.fullmatch(word) or word in ("-m", "--module")):
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            last = None if equals else name.replace("-", "_")
            options[name.replace("-", "_")] = value
        elif last is not None and not SCRIPT.fullmatch(word):
            options[last], last = word, None
        elif SCRIPT.fullmatch(word):
            break
    return options


def _torchrun(given: Mapping[str, str], environment: Environment) -> JobKey | None:
    """Every option of torchrun can be given as a variable: PET_NNODES for --nnodes."""

    def value(name: str) -> str | None:
        return given.get(name) or environment.get(f"PET_{name.upper()}") or None

    if "standalone" in given or environment.get("PET_STANDALONE") == "1":
        return None
    host, _, port = (value("rdzv_endpoint") or "").rpartition(":")
    dynamic = (value("rdzv_backend") or "static") != "static"
    return _over_hosts(
        "torchrun",
        hosts=_hosts(value("nnodes")),
        place=None if dynamic else _whole(value("node_rank")),
        job=value("rdzv_id"),
        meeting=(host, port) if host else (value("master_addr"), value("master_port")),
    )


def _accelerate(given: Mapping[str, str], environment: Environment) -> JobKey | None:
    """Options come first, then accelerate's configuration file: the one given, or its usual one."""
    known = {**_configured(_accelerate_file(given, environment)), **given}
    return _over_hosts(
        "accelerate",
        hosts=_hosts(known.get("num_machines")),
        place=_whole(known.get("machine_rank")),
        meeting=(known.get("main_process_ip"), known.get("main_process_port")),
    )


def _accelerate_file(given: Mapping[str, str], environment: Mapping[str, str]) -> Path:
    if given.get("config_file"):
        return Path(given["config_file"])
    caches = environment.get("XDG_CACHE_HOME") or f"{environment.get('HOME', '')}/.cache"
    home = environment.get("HF_HOME") or f"{caches}/huggingface"
    return Path(home) / "accelerate" / "default_config.yaml"


def _configured(file: Path) -> dict[str, str]:
    """Four plain lines of its YAML are of interest; nothing else is read."""
    try:
        text = read_start(file, _MOST_BYTES).decode("utf-8", "replace")
    except UnreadableInputError:
        return {}
    pairs = {match["name"]: match["value"].strip("'\"") for match in _CONFIGURED.finditer(text)}
    return {name: value for name, value in pairs.items() if value not in ("null", "~", "")}


def _over_hosts(
    launcher: str,
    *,
    hosts: tuple[int, int] | None,
    place: int | None,
    meeting: tuple[str | None, str | None],
    job: str | None = None,
) -> JobKey | None:
    """Return None on a single host. `hosts`: at least, at most; `meeting`: address and port."""
    if hosts is None or hosts == (1, 1):
        return None
    least, most = hosts
    address, port = meeting
    named = job is not None and job != "none"
    return JobKey(
        name=f"{launcher} {job}" if named else launcher,
        # With a name of its own, hosts may give the address in different ways.
        meeting=None if named else f"{address or 'localhost'}:{port or _TORCH_PORT}",
        place=place,
        places=most if least == most else None,
    )


def _hosts(text: str | None) -> tuple[int, int] | None:
    """torchrun's --nnodes: 2, or 1:4 for at least one and at most four."""
    match = _HOSTS.fullmatch(text or "")
    if match is None:
        return None
    return int(match[1]), int(match[2] or match[1])


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and len(text) < 10 else None


# Which job this `stepscope run` belongs to, so that several of them share one run folder.
#
# Every host of a job, or every task of srun and mpirun, may start its own `stepscope run`. What
# they have in common is read from their launcher's options or from the environment.

_TORCH_PORT = "29500"
_MOST_RESTARTS = 1000  # of workers by torchrun, between two starts of its job
_LOCAL = re.compile(r"localhost|127\.[\d.]+|::1|0\.0\.0\.0|\[::1?\]")
_POD = re.compile(r"(?P<job>.+?)-(?:master|worker|node|launcher|server)-(?P<place>\d+)(?:-.*)?")


class JobKey(msgspec.Struct, frozen=True, kw_only=True):
    """The same in every `run` of one job, but for `place`."""

    name: str  # "Slurm 4711.0"
    meeting: str | None = None  # the address and port where the ranks find each other
    place: int | None = None  # of this `run` among the job's, from 0
    places: int | None = None  # how many there will be
    attempt: int = 0  # how many times the job was started before, where that is known
    allocation: str | None = None  # the scheduler's job, which may be started again
    one_terminal: bool = False  # every part prints to the same place, as srun's tasks do

    def is_job_of(self, other: JobKey) -> bool:
        """Return whether both are parts of one job, or attempts at it.

        A job that is started again may run on other hosts, and mpirun gives it another number.
        """
        if self.attempt and self.allocation and self.allocation == other.allocation:
            return True
        return self.name == other.name and _may_be_one_address(self.meeting, other.meeting)


def find_job(
    command: Sequence[str], environment: Environment, named: str | None = None
) -> JobKey | None:
    """Return None if this `run` is alone, as far as can be told. `named` is the user's name of
    the job.
    """
    found = next(filter(None, (look(command, environment) for look in _PLACES_TO_LOOK)), None)
    if found is not None and "SLURM_JOB_ID" in environment:
        allocation = f"Slurm {environment['SLURM_JOB_ID']}"
        attempt = found.attempt or _restarts(environment)
        found = replace(found, allocation=allocation, attempt=attempt)
    if named is None:
        return found
    return replace(found or JobKey(name=named), name=named, meeting=None)


def _may_be_one_address(one: str | None, other: str | None) -> bool:
    """The host itself may call its address localhost."""
    if one is None or other is None or one == other:
        return one == other
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    return port == other_port and any(map(_LOCAL.fullmatch, (host, other_host)))


def _slurm_step(_command: Sequence[str], environment: Environment) -> JobKey | None:
    """srun started this `run`: srun stepscope run -- python train.py."""
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID"))
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if step is None or not tasks or tasks < 2 or "SLURM_JOB_ID" not in environment:
        return None
    return JobKey(
        name=f"Slurm {environment['SLURM_JOB_ID']}.{step}",
        place=_number(environment, "SLURM_PROCID"),
        places=tasks,
        one_terminal=True,
    )


def _mpi(_command: Sequence[str], environment: Environment) -> JobKey | None:
    """mpirun started this `run`."""
    tasks = _number(environment, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PMI_ID_JOB")
    job = next((environment[name] for name in names if environment.get(name)), None)
    if not tasks or tasks < 2:
        return None
    return JobKey(
        name=f"MPI {job}" if job else "MPI",
        meeting=None if job else _meeting(environment),
        place=_number(environment, "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
        places=tasks,
        one_terminal=True,
    )


def _mpirun(command: Sequence[str], environment: Environment) -> JobKey | None:
    """mpirun in a Slurm job: it starts its daemons with srun, whose variables reach the tasks."""
    from_mpirun = {"OMPI_COMM_WORLD_RANK", "MPI_LOCALNRANKS"} & environment.keys()
    return _mpi(command, environment) if from_mpirun else None


def _torch_worker(_command: Sequence[str], environment: Environment) -> JobKey | None:
    """torchrun started this `run`: torchrun --no-python stepscope run -- python train.py."""
    run = environment.get("TORCHELASTIC_RUN_ID")
    world = _number(environment, "WORLD_SIZE")
    if run is None or not world or world < 2:
        return None
    return JobKey(
        name=f"torchrun {run}",
        meeting=_meeting(environment),
        place=_number(environment, "RANK"),
        places=world,
        attempt=_restarts(environment) * _MOST_RESTARTS
        + (_number(environment, "TORCHELASTIC_RESTART_COUNT") or 0),
    )


def _kubernetes(_command: Sequence[str], environment: Environment) -> JobKey | None:
    """Look for a pod of a PyTorchJob, an indexed Job or a JobSet."""
    if "KUBERNETES_SERVICE_HOST" not in environment:
        return None
    pod = _POD.fullmatch(environment.get("HOSTNAME", ""))
    index = _number(environment, "JOB_COMPLETION_INDEX", "RANK")
    name = environment.get("JOBSET_NAME") or environment.get("JOB_NAME") or (pod and pod["job"])
    pods = _number(environment, "WORLD_SIZE", "NNODES")
    if not name or (pods is not None and pods < 2) or (index is None and pod is None):
        return None
    place = index if index is not None or pod is None else int(pod["place"])
    return JobKey(name=f"Kubernetes {name}", place=place, places=pods)


def _by_hand(_command: Sequence[str], environment: Environment) -> JobKey | None:
    """MASTER_ADDR and a rank, as scripts and Lightning expect them."""
    if not environment.get("MASTER_ADDR"):
        return None
    hosts = _number(environment, "NODE_RANK", "GROUP_RANK")
    ranks, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if hosts is not None:
        places = _number(environment, "NNODES", "NUM_NODES")
        return JobKey(name="hosts", meeting=_meeting(environment), place=hosts, places=places)
    if ranks is None or not world or world < 2:
        return None
    return JobKey(name="ranks", meeting=_meeting(environment), place=ranks, places=world)


def _slurm_job(_command: Sequence[str], environment: Environment) -> JobKey | None:
    """Look for one `run` in a batch script, around srun, or in a step of one task.

    Slurm may put the job in its queue again.
    """
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return None
    step = _number(environment, "SLURM_STEP_ID", "SLURM_STEPID")
    name = f"Slurm {job}" if step is None else f"Slurm {job}.{step}"
    return JobKey(name=name, place=0, places=1)


# The first that finds something decides: a scheduler's own number is never used twice.
_PLACES_TO_LOOK: tuple[Callable[[Sequence[str], Environment], JobKey | None], ...] = (
    _mpirun,
    _slurm_step,
    _mpi,
    _torch_worker,
    _launcher,
    _kubernetes,
    _by_hand,
    _slurm_job,
)


def _restarts(environment: Environment) -> int:
    """Return how many times Slurm has put the job back into its queue."""
    return _number(environment, "SLURM_RESTART_COUNT") or 0


def _meeting(environment: Environment) -> str | None:
    address = environment.get("MASTER_ADDR")
    return f"{address}:{environment.get('MASTER_PORT') or _TORCH_PORT}" if address else None


def _number(environment: Environment, *names: str) -> int | None:
    """Return the first of these variables that holds a number."""
    texts = (environment.get(name, "") for name in names)
    return next((int(text) for text in texts if text.isdecimal() and len(text) < 10), None)


def folder_name(key: JobKey, script: str) -> str:
    """Return the same on every host, for a job without --out; hosts may call an address
    differently.
    """
    words = f"{key.name} {(key.meeting or '').rpartition(':')[2]}"
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", words).strip("-")[:60]
    return f"{slug}-{script_slug(script)}"
