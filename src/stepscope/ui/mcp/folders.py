"""The folders that a server may read. Everything outside them is refused."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.ui.words import one_line

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_ID = "id:"
_DEEPEST, _MOST_ENTRIES = 3, 20_000


class NotAllowedError(UsageError):
    """The user of the server did not allow this."""

    kind = "not-allowed"


class AllowedFolders:
    """Resolves the paths of questions: relative ones against these folders, in their order."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(root.resolve() for root in roots)

    def resolve(self, text: str) -> Path:
        """Return the real path of a file or a folder. NotAllowedError outside, and for links out.

        `id:…` is what `find_runs` calls a run: it works for names that no JSON can hold.
        """
        if text.startswith(_ID):
            return self._of_id(text.removeprefix(_ID))
        if not text or "\0" in text:
            raise UsageError("name a path: a run folder, a trace or a folder of traces")
        if _ADDRESS.match(text):
            raise NotAllowedError(
                f"{one_line(text)[:200]}: this server reads local files only",
                f"name a path below {self.words}",
            )
        given = [root / text for root in self.roots]
        real = next((path for path in map(_real, given) if path and self._holds(path)), None)
        if real is not None:
            self._refuse_links_out(real)
            return real
        inside = any(self._holds(Path(os.path.normpath(path))) for path in given)
        if inside and not any(map(_real, given)):
            raise UnreadableInputError(
                f"{one_line(text)[:200]} does not exist", "find_runs lists the runs that do"
            )
        raise NotAllowedError(
            f"{one_line(text)[:200]} is outside the folders that this server may read",
            f"name a path below {self.words}, or start the server with this folder: "
            "stepscope mcp FOLDER",
        )

    def stamp(self, texts: Sequence[str]) -> str:
        """Return what changes with the files below these paths; "" where that is not known."""
        digest, left = hashlib.blake2b(digest_size=8), _MOST_ENTRIES
        for text in texts:
            for file, state in _states(self.resolve(text)):
                digest.update(os.fsencode(f"{file}\0{state.st_mtime_ns}\0{state.st_size}\0"))
                left -= 1
        return digest.hexdigest() if texts and left > 0 else ""

    @property
    def words(self) -> str:
        """Return the folders for a sentence."""
        return one_line(", ".join(map(str, self.roots)))[:300]

    def shown(self, path: Path) -> str:
        """Return a path as questions may name it: relative to the first folder."""
        first = self.roots[0]
        return str(path.relative_to(first)) if path.is_relative_to(first) else str(path)

    def _holds(self, path: Path) -> bool:
        return any(path.is_relative_to(root) for root in self.roots)

    def _of_id(self, run: str) -> Path:
        from stepscope.ui.serve.listed_runs import RunsDirectory

        for root in self.roots:
            directory = RunsDirectory(root)
            if (path := directory.folder_of(run)) is not None:
                self._refuse_links_out(path)
                return path
        raise UnreadableInputError(
            f"there is no run {one_line(run)[:80]!r}", "find_runs lists the runs and their ids"
        )

    def _refuse_links_out(self, path: Path) -> None:
        """A link in a run folder would let an answer quote any file."""
        for entry in _entries(path):
            inner = Path(entry.path)
            real = _real(inner) if entry.is_symlink() else None
            if real is not None and not self._holds(real):
                raise NotAllowedError(
                    f"{one_line(str(inner))[:200]} is a link that leads out of the folders that "
                    "this server may read",
                    "copy the file, or start the server with the folder that it leads to",
                )


def _real(path: Path) -> Path | None:
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        return None


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield what is in a folder and in those below it, without following links."""
    waiting, left = [(folder, 0)], _MOST_ENTRIES
    while waiting and left > 0:
        path, depth = waiting.pop()
        try:
            entries = list(os.scandir(path)) if path.is_dir() else []
        except OSError:
            continue
        left -= len(entries)
        yield from entries
        if depth < _DEEPEST:
            inner = (entry for entry in entries if entry.is_dir(follow_symlinks=False))
            waiting += [(Path(entry.path), depth + 1) for entry in inner]


def _states(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files of a run, or the one file, with times and sizes."""
    try:
        yield str(path), path.stat()
        for entry in sorted(_entries(path), key=lambda entry: entry.path):
            yield entry.path, entry.stat()
    except OSError:  # it goes away while we look: it is another one then
        return
