"""ssh://host/folder: fsspec's SFTP, with the hosts and keys that `ssh` itself knows.

`host` may be a name from ~/.ssh/config. A host whose key differs from the one in known_hosts is
refused; a new host is accepted and remembered there, as with
`ssh -o StrictHostKeyChecking=accept-new`. ~/.ssh/config may ask for more: with `yes`, new hosts are
refused.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import paramiko
from fsspec.implementations.sftp import SFTPFileSystem

from stepscope.errors import StepscopeError
from stepscope.trace.files import read_whole

_CONNECT_S = 15.0
_CONFIG, _KNOWN_HOSTS = Path("~/.ssh/config"), Path("~/.ssh/known_hosts")


class _AcceptNew(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]
    """Add a host that is seen for the first time to known_hosts, as `ssh` writes it."""

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        del client
        line = f"{hostname} {key.get_name()} {key.get_base64()}\n"
        file = _KNOWN_HOSTS.expanduser()
        with contextlib.suppress(OSError):  # it is asked again the next time, as with `ssh`
            file.parent.mkdir(mode=0o700, exist_ok=True)
            with open(file, "a+b", opener=partial(os.open, mode=0o600)) as known:
                known.write(_line_break_before(known) + line.encode())


def _line_break_before(file: BinaryIO) -> bytes:
    """Return what an unfinished last line needs."""
    if not file.seek(0, os.SEEK_END):
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read(1) == b"\n" else b"\n"


class KnownHostFiles(SFTPFileSystem):  # type: ignore[misc]
    """The files of one host."""

    def _connect(self) -> None:
        self.client = paramiko.SSHClient()
        with contextlib.suppress(OSError):
            self.client.load_system_host_keys()
        known_only = self.ssh_kwargs.pop("known_only", False)
        policy = paramiko.RejectPolicy() if known_only else _AcceptNew()
        self.client.set_missing_host_key_policy(policy)
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
    """Return what ~/.ssh/config says about a host."""
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
        "known_only": found.get("stricthostkeychecking", "").lower() == "yes",
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
