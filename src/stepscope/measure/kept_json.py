"""A JSON file that can still be written when the disk is full or no more files can be opened.

It takes a whole block of the disk when it is first written, and stays open. When a later version
cannot be written as a new file, the longest version that fits overwrites it in place.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from stepscope.measure import folder as layout

if TYPE_CHECKING:
    from pathlib import Path

_BLOCK = 4096


class KeptJson:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._identity: tuple[int, int] | None = None

    def write(self, *versions: Any, last: bool = False) -> None:
        """Write the first version; if that fails, overwrite the file with the first that fits.

        Raises OSError if neither is possible, and FileExistsError if another process owns the file.
        """
        data = _padded(versions[0], 0 if last else _BLOCK)
        if self._identity is None:
            self._make(self.path, data)
        else:
            try:
                self._make(layout.temporary(self.path), data)
            except OSError:
                if not self._write_over(versions):
                    raise
        if last:
            self._let_go()

    def _make(self, path: Path, data: bytes) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write_all(file, data)
            if path != self.path:
                path.replace(self.path)
        except BaseException:
            os.close(file)
            layout.remove(path)
            raise
        self._let_go()
        self._file, self._identity = file, _identity(file)

    def _write_over(self, versions: tuple[Any, ...]) -> bool:
        if not self._is_ours() or self._file is None:
            return False
        size = os.fstat(self._file).st_size
        for version in versions:
            data = _padded(version, size)
            if len(data) == size:
                return os.pwrite(self._file, data, 0) == size
        return False

    def _let_go(self) -> None:
        if self._is_ours() and self._file is not None:
            os.close(self._file)
        self._file = None

    def _is_ours(self) -> bool:
        """A script may close every file it finds, and get the same number for one of its own."""
        try:
            return self._file is not None and _identity(self._file) == self._identity
        except OSError:
            return False


def _padded(value: Any, size: int) -> bytes:
    """Spaces after a JSON value mean nothing."""
    return json.dumps(value).encode().ljust(size - 1 if size else 0) + (b"\n" if size else b"")


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino
