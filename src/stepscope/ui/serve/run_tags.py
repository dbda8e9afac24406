"""Words that people give to runs: one JSON file per served folder, replaced as a whole."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import StepscopeError, UsageError
from stepscope.trace.regular_files import MissingFileError, open_to_append, read_whole
from stepscope.ui.html.render import write_atomically
from stepscope.ui.words import one_line

try:
    import fcntl
except ImportError:  # not a Unix: two servers of one folder may lose each other's tags
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

MOST_TAGS = 20  # of one run
LONGEST_TAG = 40


class RunTags:
    """Tags by run id. Another server of the same folder may change them too."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()

    def all(self) -> dict[str, tuple[str, ...]]:
        """A damaged file is an error: tags are not made up, and not overwritten."""
        try:
            text = read_whole(self._file)
        except MissingFileError:
            return {}
        try:
            return msgspec.json.decode(text, type=dict[str, tuple[str, ...]])
        except msgspec.DecodeError:
            raise UsageError(
                f"{self._file} is damaged: repair or remove it; it holds the tags of runs"
            ) from None

    def set(self, run_id: str, tags: Iterable[str]) -> tuple[str, ...]:
        """Replace a run's tags; what is kept is returned."""
        kept = clean_tags(tags)
        with self._lock, self._locked():
            every = self.all()
            if kept:
                every[run_id] = kept
            else:
                every.pop(run_id, None)
            try:
                write_atomically(self._file, json.dumps(every, indent=0))
            except OSError as error:
                raise UsageError(f"{self._file} cannot be written: {error.strerror}") from None
        return kept

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Against other processes."""
        if fcntl is None:
            yield
            return
        try:
            descriptor = open_to_append(self._file.with_suffix(".lock"))
        except (OSError, StepscopeError) as error:
            raise UsageError(f"{self._file.parent} cannot be written: {error}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def clean_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """Without blanks around them, each once. UsageError for too many or too long ones."""
    words = dict.fromkeys(one_line(tag).strip() for tag in tags)
    kept = tuple(word for word in words if word)
    if len(kept) > MOST_TAGS:
        raise UsageError(f"a run takes at most {MOST_TAGS} tags")
    if long := next((word for word in kept if len(word) > LONGEST_TAG), None):
        raise UsageError(f"a tag has at most {LONGEST_TAG} characters: {long[:LONGEST_TAG]}…")
    return kept
