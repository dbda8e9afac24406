"""Several hosts on one machine, each with a name, an address, processes and mounts of its own.

    with Lab(hosts=2) as lab:
        job = lab.torchrun([str(script)], ranks=2)
        print(job["node1"].code, job["node1"].stdout)

A host is a set of Linux namespaces (network, UTS, mount, PID) kept open by one process. The hosts'
`eth0` are plugged into a bridge, which has a namespace too. Nothing has a name outside of it, so
that two laboratories never clash, and the kernel removes everything when the keepers end; they end
with the process that started them, even if it is killed.

Needs root, `ip` and `tc` (iproute2), `unshare`, `nsenter` and `setpriv` (util-linux); for clocks
that are off, a C compiler. `why_not()` says what is missing.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount", "sysctl")
MASTER_PORT = 29500  # every laboratory has a network of its own
TIMEOUT_S = 300.0  # on a busy machine, a job takes minutes to start
_NAMESPACES = ("--net", "--uts", "--mount", "--pid")
_FIRST_ORDER, _LAST_ORDER = 100, 200  # of the firewall's rules


@functools.cache
def why_no_delay() -> str | None:
    """Why messages cannot be made late here; None if they can."""
    if reason := why_not():
        return reason
    late = "ip link set lo up && tc qdisc add dev lo root netem delay 1ms"
    tried = subprocess.run(
        ["unshare", "--net", "sh", "-c", late], capture_output=True, text=True, check=False
    )
    return f"no netem in this kernel: {tried.stderr.strip()}" if tried.returncode else None


@functools.cache
def why_not() -> str | None:
    """Why this machine cannot have a laboratory; None if it can."""
    if sys.platform != "linux":
        return "hosts are made of Linux namespaces"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "namespaces and bridges need root"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "ip", "link", "add", "br0", "type", "bridge"],
        capture_output=True,
        text=True,
    )
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


def why_no_shifted_clock() -> str | None:
    """Why the hosts' clocks cannot differ here; None if they can."""
    if shutil.which("cc") is None:
        return "no C compiler for shifted_clock.c"
    return None if sys.platform == "linux" else "LD_PRELOAD is Linux's"


@dataclass(frozen=True, kw_only=True)
class HostOutcome:
    """What a command left behind on one host. `code` is negative for a signal."""

    code: int
    stdout: str
    stderr: str
    seconds: float


@dataclass(kw_only=True)
class Host:
    """One host: where it is in the job, how it is reached, and what its processes find there."""

    name: str
    place: int
    address: str
    keeper: subprocess.Popen[bytes]
    inside: int  # the number, in this machine's counting, of the host's first process
    environment: dict[str, str] = field(default_factory=dict)

    def into(self, *command: str) -> list[str]:
        """The command line that runs `command` on this host."""
        return ["nsenter", f"--target={self.inside}", *_NAMESPACES, "--", *command]


class HostProcess:
    """A command that runs on a host. Its output goes to files, so that no pipe ever fills up."""

    def __init__(
        self, host: Host, command: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        self.host = host
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        self._started = time.monotonic()
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self._process = subprocess.Popen(
                host.into(*command), stdout=out, stderr=err, env=dict(environment)
            )

    def wait(self, timeout_s: float = TIMEOUT_S) -> HostOutcome:
        """Raises TimeoutError with the end of its output."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            raise TimeoutError(
                f"{self.host.name} still ran after {timeout_s:.0f} s:\n{self.stdout()[-2000:]}"
                f"\n{self.stderr()[-4000:]}"
            ) from None
        return HostOutcome(
            code=code,
            stdout=self.stdout(),
            stderr=self.stderr(),
            seconds=time.monotonic() - self._started,
        )

    def collect(self) -> None:
        """After its host has ended, and the command with it."""
        self._process.kill()
        self._process.wait()

    def running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        """To the command itself: `nsenter` passes no signal on."""
        for pid in _children(self._process.pid):
            os.kill(pid, number)

    def stdout(self) -> str:
        return self._stdout.read_text(errors="replace")

    def stderr(self) -> str:
        return self._stderr.read_text(errors="replace")

    def wait_for_line(self, text: str, timeout_s: float = TIMEOUT_S) -> None:
        """Until `text` is in the command's output."""
        deadline = time.monotonic() + timeout_s
        while text not in self.stdout():
            if not self.running() or time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self.host.name} never printed {text!r}:\n{self.stdout()[-2000:]}"
                    f"\n{self.stderr()[-4000:]}"
                )
            time.sleep(0.05)


class Lab:
    """`hosts` hosts named node0, node1, ... on one network; all links as fast as the machine.

    With `links` of 2, every host has an `eth1` too, on a network of its own, and so on.
    """

    def __init__(self, hosts: int, links: int = 1) -> None:
        self._count, self._links = hosts, links
        self._keepers: list[subprocess.Popen[bytes]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="stepscope-lab-"))
        self._processes: list[HostProcess] = []
        self._switch = 0
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Self:
        try:
            self._switch = self._keep("switch")[1]
            for link in range(self._links):
                _inside(self._switch, "ip", "link", "add", f"br{link}", "type", "bridge")
                _inside(self._switch, "ip", "link", "set", f"br{link}", "up")
            for place in range(self._count):
                self._add_host(place)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process of every host; the kernel then removes the namespaces."""
        for keeper in self._keepers:
            _end(keeper)
        for process in self._processes:
            process.collect()
        shutil.rmtree(self._folder, ignore_errors=True)

    # What happens to a host

    def shape(
        self, name: str, rate: str, direction: str = "both", *, link: int = 0, burst: str = "64kb"
    ) -> None:
        """Limit what the host sends ("out"), what it gets ("in") or both, e.g. to "40mbit". What
        fits into a burst is sent at once."""
        host = self.hosts[name]
        limit = ("root", "tbf", "rate", rate, "burst", burst, "latency", "400ms")
        if direction in ("out", "both"):
            _inside(host.inside, "tc", "qdisc", "replace", "dev", f"eth{link}", *limit)
        if direction in ("in", "both"):
            port = _port(host.place, link)
            _inside(self._switch, "tc", "qdisc", "replace", "dev", port, *limit)

    def delay(self, name: str, time: str) -> None:
        """What comes to the host comes later, e.g. by "5ms"; not together with a limited "in"."""
        later = ("root", "netem", "delay", time, "limit", "100000")
        port = f"port{self.hosts[name].place}"
        _inside(self._switch, "tc", "qdisc", "replace", "dev", port, *later)

    def keep_windows(self, name: str) -> None:
        """Connections that rest for a moment go on as fast as before."""
        setting = "net.ipv4.tcp_slow_start_after_idle=0"
        _inside(self.hosts[name].inside, "sysctl", "-qw", setting)

    def unplug(self, name: str) -> None:
        """Take the host off the network; its processes go on."""
        for link in range(self._links):
            port = _port(self.hosts[name].place, link)
            _inside(self._switch, "ip", "link", "set", port, "down")

    def plug(self, name: str) -> None:
        """Back onto the network."""
        _inside(self._switch, "ip", "link", "set", f"port{self.hosts[name].place}", "up")

    def kill(self, name: str) -> None:
        """The host dies: every process on it at once, and nobody is told."""
        _end(self.hosts[name].keeper)

    def firewall(self, name: str) -> None:
        """Let only the host's connections of this moment go on: what it sends from or to any other
        port is lost."""
        host = self.hosts[name]
        for port in _ports(host):
            for end in ("sport", "dport"):
                rule = ("ipproto", "tcp", end, str(port), "lookup", "main")
                _inside(host.inside, "ip", "rule", "add", "order", str(_FIRST_ORDER), *rule)
        block = ("ipproto", "tcp", "to", f"{_NETWORK}.0/24", "blackhole")
        _inside(host.inside, "ip", "rule", "add", "order", str(_LAST_ORDER), *block)

    def shift_clock(self, name: str, by_ms: float, drift_ppm: float = 0.0) -> None:
        """Commands started on the host from now on see a wall clock that is off, and drifts."""
        library = self._folder / "shifted_clock.so"
        if not library.exists():
            flags = ("-shared", "-fPIC", "-O1", "-o", str(library))
            source = Path(__file__).with_name("shifted_clock.c")
            subprocess.run(["cc", *flags, str(source), "-ldl", "-lpthread"], check=True)
        self.hosts[name].environment |= {
            "LD_PRELOAD": str(library),
            "CLOCK_SHIFT_NS": str(round(by_ms * 1e6)),
            "CLOCK_DRIFT_PPM": str(drift_ppm),
        }

    def make_read_only(self, name: str, folder: Path) -> None:
        """On this host `folder` can be read and not written; on the others it stays as it is."""
        host = self.hosts[name]
        _inside(host.inside, "mount", "--bind", str(folder), str(folder))
        _inside(host.inside, "mount", "-o", "remount,ro,bind", str(folder))

    # What runs on hosts

    def start(
        self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> HostProcess:
        """Start a command on a host, with the host's own variables."""
        host = self.hosts[name]
        folder = self._folder / f"{len(self._processes):03}-{name}"
        folder.mkdir()
        environment = {**_environment(), **host.environment, **(env or {})}
        process = HostProcess(host, command, environment, folder)
        self._processes.append(process)
        return process

    def torchrun(
        self,
        script: Sequence[str],
        *,
        ranks: int = 1,
        env: Mapping[str, str] | None = None,
        around: Mapping[str, Sequence[str]] | Sequence[str] = (),
        options: Sequence[str] = (),
        rendezvous: str = "static",
        only: Iterable[str] | None = None,
    ) -> dict[str, HostProcess]:
        """Start one job on all hosts (or `only` these), `ranks` on each. `around` goes before
        torchrun's command line, e.g. `stepscope run --`; a mapping has one for each host."""
        started = {}
        for name in self.hosts if only is None else only:
            before = around.get(name, ()) if isinstance(around, Mapping) else around
            launch = self.torchrun_command(name, script, ranks, rendezvous, options)
            started[name] = self.start(name, [*before, *launch], env)
        return started

    def torchrun_command(
        self,
        name: str,
        script: Sequence[str],
        ranks: int = 1,
        rendezvous: str = "static",
        options: Sequence[str] = (),
    ) -> list[str]:
        """`rendezvous` is "static" (each host is told its place) or "c10d" (they agree on it)."""
        host, first = self.hosts[name], next(iter(self.hosts.values()))
        if rendezvous == "static":
            meet = [f"--node-rank={host.place}", f"--master-addr={first.address}"]
            meet += [f"--master-port={MASTER_PORT}"]
        else:
            meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={first.address}:{MASTER_PORT}"]
            meet += ["--rdzv-id=lab", f"--local-addr={host.address}"]
        nodes = [] if any(one.startswith("--nnodes") for one in options) else [self._nodes()]
        launch = [sys.executable, "-m", "torch.distributed.run", *nodes]
        return [*launch, f"--nproc-per-node={ranks}", *meet, *options, *script]

    def _nodes(self) -> str:
        return f"--nnodes={self._count}"

    # How a host is made

    def _add_host(self, place: int) -> None:
        name = f"node{place}"
        keeper, inside = self._keep(name)
        host = Host(
            name=name,
            place=place,
            address=_address(place),
            keeper=keeper,
            inside=inside,
            environment={"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"},
        )
        _inside(inside, "ip", "link", "set", "lo", "up")
        for link in range(self._links):
            end = f"eth{link}"
            # Give the host its `eth0`, `eth1`, ...
            port = _port(place, link)
            pair = ("type", "veth", "peer", "name", f"eth{link}", "netns", str(inside))
            _inside(self._switch, "ip", "link", "add", port, *pair)
            _inside(self._switch, "ip", "link", "set", port, "master", f"br{link}", "up")
            _inside(inside, "ip", "address", "add", f"{_address(place, link)}/24", "dev", end)
            _inside(inside, "ip", "link", "set", end, "up")
        _inside(inside, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
        self._replace_file(host, "/proc/sys/kernel/random/boot_id", f"{uuid.uuid4()}\n")
        self._replace_file(host, "/etc/hosts", _names(self._count))
        self._replace_file(host, "/etc/resolv.conf", "")
        self.hosts[name] = host

    def _replace_file(self, host: Host, path: str, text: str) -> None:
        """Give the host its own version of a system file."""
        own = self._folder / f"{host.name}-{Path(path).name}"
        own.write_text(text)
        _inside(host.inside, "mount", "--bind", str(own), str(Path(path).resolve()))

    def _keep(self, name: str) -> tuple[subprocess.Popen[bytes], int]:
        """Namespaces that live as long as a process that does nothing but collect orphans."""
        idle = f"hostname {name} && echo ready && sleep infinity & wait"
        spaces = (*_NAMESPACES, "--fork", "--kill-child", "--mount-proc")
        keeper = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", "unshare", *spaces, "sh", "-c", idle],
            stdout=subprocess.PIPE,
        )
        self._keepers.append(keeper)
        assert keeper.stdout is not None
        if keeper.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{name} could not be made")
        (inside,) = _children(keeper.pid)
        return keeper, inside


_NETWORK = "10.77.0"


def _address(place: int, link: int = 0) -> str:
    network = f"10.77.{link}" if link else _NETWORK
    return f"{network}.{place + 1}"


def _port(place: int, link: int) -> str:
    """The switch's end of a host's link."""
    return f"port{place}-{link}" if link else f"port{place}"


def _names(hosts: int) -> str:
    """/etc/hosts of every host."""
    lines = [f"{_address(place)} node{place}" for place in range(hosts)]
    return "\n".join(["127.0.0.1 localhost", *lines, ""])


def _environment() -> dict[str, str]:
    """This process's variables, without those that would tell a job of its surroundings."""
    launchers = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "KUBERNETES_", "PET_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "HOSTNAME"):
        kept.pop(name, None)
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _inside(pid: int, *command: str) -> None:
    """Run a command on a host, but counted among this machine's processes: it may name others."""
    enter = ["nsenter", f"--target={pid}", "--net", "--uts", "--mount", "--"]
    done = subprocess.run([*enter, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _ports(host: Host) -> set[int]:
    """Ports of the host's connections and listeners."""
    tables = [Path(f"/proc/{host.inside}/net/{name}") for name in ("tcp", "tcp6")]
    lines = [line for table in tables for line in table.read_text().splitlines()[1:]]
    ends = [end for line in lines for end in line.split()[1:3]]
    return {int(end.rpartition(":")[2], 16) for end in ends} - {0}


def _end(keeper: subprocess.Popen[bytes]) -> None:
    keeper.kill()
    keeper.wait()
    if keeper.stdout is not None:
        keeper.stdout.close()
