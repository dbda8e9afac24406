"""Two hosts on this machine that ssh reaches: an sshd each, with a host name of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_jobs import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

SSHD = "/usr/sbin/sshd"
NAMES = ("step-node1", "step-node2")
_SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
ListenAddress 127.0.0.1
SetEnv GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
"""
_CLIENT = """\
HostName 127.0.0.1
IdentityFile {folder}/user_key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


def why_not() -> str | None:
    """Why there can be no such hosts here."""
    tools = [tool for tool in ("ssh", "ssh-keygen", "unshare", "pdsh") if not shutil.which(tool)]
    if not Path(SSHD).exists():
        tools.append("sshd")
    if tools:
        return f"not installed: {', '.join(tools)}"
    return None if os.geteuid() == 0 else "host names of their own need root"


@contextmanager
def ssh_hosts(folder: Path) -> Iterator[Path]:
    """A folder for the front of PATH: its `ssh` knows the hosts."""
    folder.mkdir()
    for key in ("host_key", "user_key"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(make, check=True)
    (folder / "server").write_text(_SERVER.format(folder=folder))
    ports = {name: free_port() for name in NAMES}
    hosts = "".join(f"Host {name}\nPort {port}\n" for name, port in ports.items())
    (folder / "client").write_text(_CLIENT.format(folder=folder) + hosts)
    (folder / "bin").mkdir()
    wrapper = folder / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/client "$@"\n')
    wrapper.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    servers = [_serve(folder, name, port) for name, port in ports.items()]
    try:
        for name in NAMES:
            _await(wrapper, name)
        yield folder / "bin"
    finally:
        for server in servers:
            server.terminate()
            server.wait()


def _serve(folder: Path, name: str, port: int) -> subprocess.Popen[bytes]:
    command = f"hostname {name} && exec {SSHD} -D -e -f {folder}/server -p {port}"
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(["unshare", "--uts", "sh", "-c", command], stderr=log)


def _await(ssh: Path, name: str) -> None:
    for _ in range(100):
        done = subprocess.run([ssh, name, "hostname"], capture_output=True, text=True)
        if done.stdout.strip() == name:
            return
        time.sleep(0.2)
    raise AssertionError(f"{name} does not answer: {done.stderr}")
