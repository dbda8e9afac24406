"""A real Slurm cluster on this machine: munged, slurmctld and two slurmd with their own host names.

Everything lies in one temporary folder. Needs root, for host names of their own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

NODES = ("ss1", "ss2")
KILL_WAIT_S = 30  # Slurm's own: between SIGTERM and SIGKILL
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "unshare")
_START_S = 60.0
_CONFIGURATION = """\
ClusterName=stepscope
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=1
TopologyPlugin=topology/tree
ReturnToService=2
KillWait={kill_wait_s}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
SwitchType=switch/none
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_NODE = "NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=16 State=UNKNOWN"
_TOPOLOGY = """\
SwitchName=leaf1 Nodes=ss1
SwitchName=leaf2 Nodes=ss2
SwitchName=spine Switches=leaf[1-2]
"""


def why_not_here() -> str | None:
    """Why no cluster can be started on this machine; None if one can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"Slurm needs {', '.join(missing)}: apt install slurmctld slurmd slurm-client munge"
    if os.geteuid() != 0:
        return "host names of their own for the nodes need root"
    tried = subprocess.run(["unshare", "-u", "hostname", NODES[0]], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"unshare: {tried.stderr.strip()}"


@dataclass(slots=True)
class SlurmCluster:
    """Runs from `start` to `stop`."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="stepscope-slurm-")))
    _daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """For srun and its relatives."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}

    def start(self) -> None:
        self._configure()
        socket_path = self.folder / "munge.socket"
        options = {
            "--key-file": self.folder / "munge.key",
            "--socket": socket_path,
            "--pid-file": self.folder / "munged.pid",
            "--log-file": self.folder / "munged.log",
            "--seed-file": self.folder / "munged.seed",
        }
        self._launch("munged", "--force", "--foreground", *(f"{k}={v}" for k, v in options.items()))
        _until(socket_path.exists, "munged made no socket")
        self._launch("slurmctld", "-D", "-i")
        for node in NODES:
            inside = f"hostname {node} && exec slurmd -D -N {node}"
            self._launch("unshare", "--uts", "sh", "-c", inside)
        _until(self._is_idle, f"no two idle nodes; the logs are in {self.folder}")

    def stop(self) -> None:
        """Jobs first: their processes would outlive the daemons."""
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            self.command("scancel", "--signal=KILL", "--full", "--user=root")
            self.command("scancel", "--user=root")
            _until(lambda: not self.command("squeue", "-h"), "jobs are still there")
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def command(self, *words: str) -> str:
        """Output of sbatch, squeue, scontrol, ..."""
        return subprocess.run(
            words,
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()

    def _is_idle(self) -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):
            return self.command("sinfo", "-h", "-o", "%D %T") == f"{len(NODES)} idle"
        return False

    def _configure(self) -> None:
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        port, *ports = _free_ports(1 + len(NODES))
        for node in NODES:
            (self.folder / f"spool-{node}").mkdir()
        nodes = (_NODE.format(name=name, port=at) for name, at in zip(NODES, ports, strict=True))
        text = _CONFIGURATION.format(
            folder=self.folder,
            host=os.uname().nodename,
            port=port,
            kill_wait_s=KILL_WAIT_S,
            nodes="\n".join(nodes),
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "topology.conf").write_text(_TOPOLOGY)

    def _launch(self, *words: str) -> None:
        with (self.folder / f"{len(self._daemons)}-{words[0]}.out").open("wb") as output:
            daemon = subprocess.Popen(
                words,
                env=os.environ | self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._daemons.append(daemon)


def _path() -> str:
    """The daemons are often not on a user's path."""
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            ports.append(int(taken.getsockname()[1]))
        return ports


def _until(done: object, otherwise: str) -> None:
    assert callable(done)
    limit = time.monotonic() + _START_S
    while not done():
        assert time.monotonic() < limit, otherwise
        time.sleep(0.2)
