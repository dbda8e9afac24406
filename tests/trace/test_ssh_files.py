"""Hosts that SSH meets for the first time are remembered."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest

paramiko = pytest.importorskip("paramiko")
pytest.importorskip("fsspec")

from stepscope.trace.ssh_files import _AcceptNew, _options_of  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

NAME = "[node0]:2222"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_new_host_is_added_to_known_hosts(home: Path) -> None:
    key = paramiko.ECDSAKey.generate()
    _AcceptNew().missing_host_key(paramiko.SSHClient(), NAME, key)
    file = home / ".ssh" / "known_hosts"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    # What paramiko's connect() compares before it asks a policy: a changed key is refused there.
    client = paramiko.SSHClient()
    client.load_system_host_keys()
    (known,) = client._system_host_keys.lookup(NAME).values()
    assert known == key
    assert known != paramiko.ECDSAKey.generate()


def test_what_stands_in_known_hosts_stays(home: Path) -> None:
    file = home / ".ssh" / "known_hosts"
    file.parent.mkdir()
    file.write_text("# mine\n@cert-authority *.example ssh-ed25519 AAAA")  # no last line break
    _AcceptNew().missing_host_key(paramiko.SSHClient(), NAME, paramiko.ECDSAKey.generate())
    lines = file.read_text().splitlines()
    assert lines[:2] == ["# mine", "@cert-authority *.example ssh-ed25519 AAAA"]
    assert [line.split()[0] for line in lines[2:]] == [NAME]


def test_a_folder_that_cannot_be_written_does_not_end_the_connection(home: Path) -> None:
    (home / ".ssh").write_text("a file")
    _AcceptNew().missing_host_key(paramiko.SSHClient(), NAME, paramiko.ECDSAKey.generate())


def test_the_users_configuration_may_refuse_new_hosts(home: Path) -> None:
    (home / ".ssh").mkdir()
    (home / ".ssh" / "config").write_text("Host strict\n  StrictHostKeyChecking yes\n")
    assert _options_of("strict")["known_only"]
    assert not _options_of("other")["known_only"]
