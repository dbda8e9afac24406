"""Take a cache entry apart and write it again with correct checksums."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

MAGIC = b"stepscope-columns\n"
ALIGN = 64


@dataclass
class CacheFile:
    """The head as JSON, and every column by its table and name."""

    head: dict[str, Any]
    columns: dict[tuple[str, str], NDArray[Any]]

    @classmethod
    def read(cls, path: Path) -> CacheFile:
        data = path.read_bytes()
        start = len(MAGIC) + 16
        end = start + int.from_bytes(data[len(MAGIC) : len(MAGIC) + 8], "little")
        head = json.loads(data[start:end])
        base = end + -end % ALIGN
        columns = {
            (table, name): np.frombuffer(data, dtype, count, base + offset).copy()
            for table, name, dtype, offset, count in head.pop("columns")
        }
        return cls(head, columns)

    def layout(self) -> list[list[Any]]:
        rows, offset = [], 0
        for (table, name), values in self.columns.items():
            rows.append([table, name, values.dtype.str, offset, len(values)])
            offset += values.nbytes + -values.nbytes % ALIGN
        return rows

    def write(self, path: Path, layout: list[list[Any]] | None = None) -> None:
        """`layout` contradicts what is written."""
        body, checksum = b"", 0
        for values in self.columns.values():
            checksum = zlib.crc32(values.tobytes(), checksum)
            body += values.tobytes() + b"\0" * (-values.nbytes % ALIGN)
        head = self.head | {"columns": layout or self.layout(), "checksum": checksum}
        write_raw(path, json.dumps(head).encode(), body)


def write_raw(path: Path, head: bytes, body: bytes) -> None:
    sizes = len(head).to_bytes(8, "little") + zlib.crc32(head).to_bytes(8, "little")
    begin = MAGIC + sizes + head
    path.write_bytes(begin + b"\0" * (-len(begin) % ALIGN) + body)
