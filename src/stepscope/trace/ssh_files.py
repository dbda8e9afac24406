"""ssh://host/folder: fsspec's SFTP, with the hosts and keys that `ssh` itself knows.

`host` may be a name from ~/.ssh/config. A host whose key differs from the one in known_hosts is
refused; a new host is accepted, as with `ssh -o StrictHostKeyChecking=accept-new`.
"""

from __future__ import annotations

import contextlib
import getpass
import shlex
from pathlib import Path
from typing import Any

import paramiko
from fsspec.implementations.sftp import SFTPFileSystem

from stepscope.errors import StepscopeError
from stepscope.trace.regular_files import read_whole

_CONNECT_S = 15.0
_CONFIG = Path("~/.ssh/config")


class KnownHostFiles(SFTPFileSystem):  # type: ignore[misc]
    """The files of one host."""

    def _connect(self) -> None:
        self.client = paramiko.SSHClient()
        with contextlib.suppress(OSError):
            self.client.load_system_host_keys()
        self.client.set_missing_host_key_policy(paramiko.AutoAddPolicy())
        self.client.connect(self.host, **self.ssh_kwargs)
        self.ftp = self.client.open_sftp()


def open_ssh(url: str) -> tuple[KnownHostFiles, str]:
    """The host's files, and the path in the URL. Raises what paramiko and the network raise."""
    given = KnownHostFiles._get_kwargs_from_urls(url)
    host = given.pop("host", "")
    options = _options_of(host) | {name: value for name, value in given.items() if value}
    address = options.pop("address", host)
    return KnownHostFiles(address, **options), str(KnownHostFiles._strip_protocol(url))


def _options_of(host: str) -> dict[str, Any]:
    """What ~/.ssh/config says about a host."""
    config = paramiko.SSHConfig()
    with contextlib.suppress(StepscopeError):
        config.parse(read_whole(_CONFIG.expanduser()).decode("utf-8", "replace").splitlines())
    found = config.lookup(host)
    address, port = found.get("hostname", host), int(found.get("port", 22))
    options: dict[str, Any] = {
        "address": address,
        "port": port,
        "username": found.get("user") or getpass.getuser(),
        "timeout": _CONNECT_S,
        "banner_timeout": _CONNECT_S,
        "auth_timeout": _CONNECT_S,
    }
    keys = [str(Path(key).expanduser()) for key in found.get("identityfile", ())]
    if keys:
        options["key_filename"] = keys
    command = found.get("proxycommand")
    if found.get("proxyjump"):
        command = shlex.join(["ssh", "-W", f"{address}:{port}", found["proxyjump"]])
    if command and command != "none":
        options["sock"] = paramiko.ProxyCommand(command)
    return options
