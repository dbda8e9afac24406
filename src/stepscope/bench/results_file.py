"""The file of a bench's results: what --save writes, and --against and --again read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.records.bench_result import BenchResults
from stepscope.records.encode_json import encode_json
from stepscope.trace.regular_files import read_whole

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = 1
_MOST_BYTES = 256 << 20


def read_results(path: Path) -> BenchResults:
    """UnreadableInputError for a file that is missing or holds something else."""
    content = read_whole(path, _MOST_BYTES)
    try:
        results = msgspec.json.decode(content, type=BenchResults)
    except msgspec.MsgspecError as error:
        raise UnreadableInputError(
            f"{path} is no file of bench results: {error}; stepscope bench --save writes one"
        ) from None
    if results.schema > SCHEMA:
        raise UnreadableInputError(
            f"{path} has schema {results.schema}, this stepscope reads {SCHEMA}: install a newer one"
        )
    return results


def write_results(results: BenchResults, path: Path) -> None:
    """All of it or nothing; OSError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(encode_json(msgspec.to_builtins(results)))
    temporary.replace(path)
