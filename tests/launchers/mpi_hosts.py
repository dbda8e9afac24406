"""Two hosts for mpirun on this machine: names of their own, reached by a stand-in for ssh.

As with ssh, nothing of the environment comes along but what a login shell sets.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from launched import BIN

HOSTS = ("mh1", "mh2")
_REMOTE_SHELL = """\
#!/bin/sh
host=$1
shift
exec env -i HOME="$HOME" PATH="{path}" unshare --uts sh -c "hostname $host && $*"
"""


def why_no_mpirun() -> str | None:
    """Why mpirun cannot be tried on this machine; None if it can."""
    if shutil.which("mpirun") is None:
        return "mpirun is missing: apt install openmpi-bin"
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    return None if "Open MPI" in version else f"not Open MPI: {version[:80]}"


def why_no_hosts() -> str | None:
    if os.geteuid() != 0:
        return "host names of their own need root"
    tried = subprocess.run(["unshare", "--uts", "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"unshare: {tried.stderr.strip()}"


def mpirun(ranks: int) -> tuple[str, ...]:
    """All on this machine, however few cores it has."""
    root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    return ("mpirun", *root, "--oversubscribe", "--bind-to", "none", "-np", str(ranks))


def mpirun_on_hosts(folder: Path) -> tuple[str, ...]:
    """One rank on each host. Ranks find each other by variables that -x carries over."""
    folder.mkdir(parents=True, exist_ok=True)
    shell, hostfile = folder / "remote-shell", folder / "hostfile"
    shell.write_text(_REMOTE_SHELL.format(path=f"{BIN}:{os.environ['PATH']}"))
    shell.chmod(0o755)
    hostfile.write_text("".join(f"{host} slots=1\n" for host in HOSTS))
    where = ("--mca", "plm_rsh_agent", str(shell), "--hostfile", str(hostfile))
    carried = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
    options = [word for name in carried for word in ("-x", name)]
    return (*mpirun(len(HOSTS)), *where, *options)
