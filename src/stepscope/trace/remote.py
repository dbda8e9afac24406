"""Traces at a URL: listed through fsspec, and on this disk only while they are read.

Readers need a file that they can seek in and read twice, and capture's small files next to it. So a
trace is fetched into a scratch folder with the layout of the original. A reader holds one trace
there at a time: each worker needs scratch space for its largest trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from stepscope.errors import StepscopeError, UnreadableInputError, UsageError
from stepscope.records.folders import HOSTS
from stepscope.trace.files import ENDINGS, SIDE_FILES, is_side_file, is_trace_name

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")
_SSH = ("ssh", "sftp")
_REFUSED = ("AuthenticationException", "PasswordRequiredException", "BadAuthenticationType")
_RUN_TRACE = re.compile(r"rank-[^/]*/trace\.json[^/]*")


class RemoteTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A trace in a filesystem of fsspec, and the names of capture's files next to it."""

    url: str
    size_bytes: int = 0  # 0 if the filesystem does not say
    side_files: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.url


def is_url(path: object) -> bool:
    return isinstance(path, str) and _URL.match(path) is not None


def local_path(url: str) -> Path | None:
    """The path of a file:// URL, which needs no copy; else None."""
    from urllib.parse import unquote, urlsplit

    parts = urlsplit(url)
    if parts.scheme.lower() != "file" or parts.netloc not in ("", "localhost"):
        return None
    return Path(unquote(parts.path))


def find_remote_traces(url: str) -> list[RemoteTrace]:
    """Like discover.find_traces, for a URL."""
    filesystem, root = open_url(url)
    with url_failures(url):
        traces = _Listing(filesystem, url, root).traces()
    if not traces:
        endings = ", ".join(f"*{ending}" for ending in ENDINGS)
        raise UnreadableInputError(f"{url} holds no trace: looked for {endings}")
    return traces


@contextmanager
def fetch(trace: RemoteTrace) -> Iterator[Path]:
    """The trace and its side files, on this disk while the `with` block runs."""
    import tempfile

    filesystem, source = open_url(trace.url)
    name = PurePosixPath(source)
    with tempfile.TemporaryDirectory(prefix="stepscope-") as scratch:
        folder = Path(scratch) / (name.parent.name or "trace")
        folder.mkdir()
        with url_failures(trace.url):
            filesystem.get_file(source, str(folder / name.name))
            for other in trace.side_files:
                filesystem.get_file(str(name.with_name(other)), str(folder / other))
        try:
            yield folder / name.name
        except UnreadableInputError as error:
            message = str(error).replace(str(folder / name.name), trace.url)
            raise UnreadableInputError(message) from None


def open_url(url: str) -> tuple[Any, str]:
    """The filesystem of fsspec, and the path in it."""
    protocol = re.split(r"::|://", url, maxsplit=1)[0]
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        extra = "ssh" if protocol in _SSH else "fs"
        needed = f"pip install 'stepscope[{extra}]'"
        raise UsageError(f"{url}: reading URLs needs fsspec: {needed}") from None
    try:
        if protocol in _SSH:
            from stepscope.trace.ssh_files import open_ssh

            filesystem, path = open_ssh(url)
        else:
            filesystem, path = url_to_fs(url)
    except ImportError as error:  # its message names the package to install
        if protocol in _SSH:
            needed = "paramiko: pip install 'stepscope[ssh]'"
            raise UsageError(f"{url}: {protocol}:// needs {needed}") from None
        raise UsageError(f"{url}: {protocol}:// needs another package: {error}") from None
    except ValueError as error:
        raise UsageError(f"{url}: {error}") from None
    except Exception as error:
        raise _unreadable(url, error) from None
    return filesystem, str(path).rstrip("/") or str(path)


@contextmanager
def url_failures(url: str) -> Iterator[None]:
    """Every service has its own errors; all of them mean that the URL could not be read."""
    try:
        yield
    except StepscopeError:
        raise
    except Exception as error:
        raise _unreadable(url, error) from None


def _unreadable(url: str, error: Exception) -> UnreadableInputError:
    if isinstance(error, FileNotFoundError):
        return UnreadableInputError(f"{url} does not exist")
    kind = type(error).__name__
    if kind in _REFUSED:
        detail = str(error).strip(" .") or kind
        return UnreadableInputError(f"{url}: the host refused every SSH key: {detail}")
    if isinstance(error, PermissionError):
        return UnreadableInputError(f"{url}: no permission to read it")
    import socket

    if isinstance(error, socket.gaierror):
        return UnreadableInputError(f"{url}: no host has this name ({error.strerror})")
    why = getattr(error, "strerror", None) or str(error) or kind
    return UnreadableInputError(f"{url}: {why}")


def _side_file_order(name: str) -> tuple[bool, int, str]:
    known = name in SIDE_FILES
    return not known, SIDE_FILES.index(name) if known else 0, name


class _Listing:
    """What a URL stands for: a file, a run folder, or a folder of traces."""

    def __init__(self, filesystem: Any, url: str, root: str) -> None:
        self.filesystem, self.url, self.root = filesystem, url, root

    def traces(self) -> list[RemoteTrace]:
        if not self.filesystem.isdir(self.root):
            info = self.filesystem.info(self.root)  # raises if there is nothing
            return [self._trace(info, self._names_around())]
        here = self.filesystem.ls(self.root, detail=True)
        inner = sorted(entry["name"] for entry in here if entry["type"] == "directory")
        of_run: list[RemoteTrace] = []
        if any(PurePosixPath(name).name.startswith("rank-") for name in inner):
            # One request lists a whole run folder, however many ranks it has.
            everything = list(self.filesystem.find(self.root, detail=True).values())
            of_run = self._among(everything, lambda name: _RUN_TRACE.fullmatch(self._inside(name)))
            inner = [name for name in inner if PurePosixPath(name).name != HOSTS]
        listings = (self.filesystem.ls(folder, detail=True) for folder in inner)
        nested = (trace for listing in listings for trace in self._among(listing))
        return of_run or self._among(here) or [*nested]

    def _among(
        self, entries: list[dict[str, Any]], is_trace: Callable[[str], object] | None = None
    ) -> list[RemoteTrace]:
        is_trace = is_trace or (lambda name: is_trace_name(PurePosixPath(name).name))
        files = sorted((e for e in entries if e["type"] == "file"), key=lambda e: str(e["name"]))
        names: dict[PurePosixPath, set[str]] = {}
        for entry in files:
            path = PurePosixPath(entry["name"])
            names.setdefault(path.parent, set()).add(path.name)
        return [
            self._trace(entry, names[PurePosixPath(entry["name"]).parent])
            for entry in files
            if is_trace(entry["name"])
        ]

    def _names_around(self) -> set[str]:
        """Empty if the server cannot list a folder, as with plain http."""
        try:
            entries = self.filesystem.ls(str(PurePosixPath(self.root).parent), detail=False)
        except Exception:
            return set()
        return {PurePosixPath(entry).name for entry in entries}

    def _trace(self, info: dict[str, Any], around: set[str]) -> RemoteTrace:
        return RemoteTrace(
            url=self._url_of(info["name"]),
            size_bytes=info.get("size") or 0,
            side_files=tuple(sorted(filter(is_side_file, around), key=_side_file_order)),
        )

    def _inside(self, name: str) -> str:
        return name.removeprefix(self.root).lstrip("/")

    def _url_of(self, name: str) -> str:
        """The given URL and the rest of the path: the URL may hold more, such as a host."""
        inside = self._inside(name)
        if not inside:
            return self.url
        first, chain, others = self.url.partition("::")
        if "://" not in first:  # simplecache::s3://bucket/run: the path is at the end
            return f"{self.url.rstrip('/')}/{inside}"
        return f"{first.rstrip('/')}/{inside}{chain}{others}"
