"""Read a rank's collectives-*.json.gz: gzip members that each hold lines of columns.

A file may end amid a member; what comes before is read. A line that makes no sense is left out.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta

from stepscope.errors import UnreadableInputError
from stepscope.records.limits import MAX_DURATION_NS, MAX_STAMP_NS
from stepscope.records.run_calls import LoggedCollectives
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.regular_files import MissingFileError, list_folder, read_whole

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.trace.decode import Oddities

COLLECTIVES = "collectives-*.json.gz"
_MAX_PACKED_BYTES = 64 << 20
_MAX_TEXT_BYTES = 512 << 20  # of one file
_GZIP = 31
_Change = Annotated[int, Meta(ge=-MAX_STAMP_NS, le=MAX_STAMP_NS)]
_Place = Annotated[int, Meta(ge=0, lt=1 << 20)]


class _Columns(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of the recorder. Numbers that grow are differences to the one before."""

    created_ns: list[_Change]
    sequence: list[_Change]
    group: list[_Place]
    name: list[_Place]
    groups: list[str]
    names: list[str]
    duration_ns: list[Annotated[int, Meta(ge=0, le=MAX_DURATION_NS)]] | None = None

    @property
    def fits(self) -> bool:
        """All columns are of one length, and all places exist."""
        lengths = {len(self.created_ns), len(self.sequence), len(self.group), len(self.name)}
        if self.duration_ns is not None:
            lengths.add(len(self.duration_ns))
        if len(lengths) > 1 or not self.group:
            return False
        return max(self.group) < len(self.groups) and max(self.name) < len(self.names)


def read_collective_log(folder: Path, oddities: Oddities) -> LoggedCollectives | None:
    """None where no collectives of the whole run were captured."""
    readings = []
    for file in sorted(_parts(folder)):
        for number, line in enumerate(_text(file, oddities).split(b"\n")[:-1], 1):
            try:
                columns = decode(line, _Columns)
            except NotJsonError as error:
                oddities.add(f"{file.name}, line {number}", str(error))
                continue
            if columns.fits:
                readings.append(columns)
            else:
                oddities.add(f"{file.name}, line {number}", "its columns do not fit together")
    return _join(readings) if readings else None


def _parts(folder: Path) -> list[Path]:
    try:
        return [file for file in list_folder(folder) if file.match(COLLECTIVES)]
    except UnreadableInputError:
        return []


def _text(file: Path, oddities: Oddities) -> bytes:
    """All whole lines, up to where the file is damaged or cut."""
    try:
        packed = read_whole(file, _MAX_PACKED_BYTES)
    except MissingFileError:
        return b""
    except UnreadableInputError as error:
        oddities.unread(str(error))
        return b""
    pieces, left = [], _MAX_TEXT_BYTES
    while packed and left > 0:
        member = zlib.decompressobj(_GZIP)
        try:
            piece = member.decompress(packed, left)
        except zlib.error as error:
            oddities.add(file.name, str(error))
            break
        pieces.append(piece)
        left -= len(piece)
        packed = member.unused_data
    if left <= 0:
        oddities.left_out(f"only its first {_MAX_TEXT_BYTES >> 20} MB were read")
    return b"".join(pieces)


def _join(readings: list[_Columns]) -> LoggedCollectives:
    groups = tuple(dict.fromkeys(name for reading in readings for name in reading.groups))
    names = tuple(dict.fromkeys(name for reading in readings for name in reading.names))
    created = _concatenate(readings, "created_ns")
    sequence = _concatenate(readings, "sequence")
    known = all(reading.duration_ns is not None for reading in readings)
    durations = [np.array(reading.duration_ns, np.int64) for reading in readings] if known else []
    possible = (created > 0) & (created <= MAX_STAMP_NS) & (sequence >= 0)
    order = np.argsort(created, kind="stable")
    kept = order[possible[order]]
    return LoggedCollectives(
        groups=groups,
        names=names,
        group=_places(readings, "group", groups)[kept],
        name=_places(readings, "name", names)[kept],
        sequence=sequence[kept],
        created_ns=created[kept],
        duration_ns=np.concatenate(durations)[kept] if durations else None,
    )


def _concatenate(readings: list[_Columns], name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate([np.cumsum(np.array(getattr(one, name), np.int64)) for one in readings])


def _places(
    readings: list[_Columns], name: str, known: tuple[str, ...]
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Each reading has its own list of names; these are places in the common one."""
    place = {text: number for number, text in enumerate(known)}
    pieces = []
    for reading in readings:
        common = np.array([place[text] for text in getattr(reading, f"{name}s")], np.int32)
        pieces.append(common[np.array(getattr(reading, name), np.int64)])
    return np.concatenate(pieces)
