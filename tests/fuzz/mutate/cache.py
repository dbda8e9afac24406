"""A trace and its entry in the cache, which has right checksums and odd content."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cache_files import ALIGN, CacheFile, write_raw
from fuzz.odd_json import damage, odd_value
from shared_traces import GOLDEN
from stepscope.trace import read
from stepscope.trace.cache import Cache, find_inconsistency

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

_TRACES = ("cpu_step", "cpu_stack_memory", "cuda_step", "cuda_graph")


def mutate(rng: Random, folder: Path) -> Path:
    case = folder / "case"
    (case / "cache").mkdir(parents=True)
    trace = case / "trace.json"
    trace.write_bytes(_trace(rng.choice(_TRACES)))
    store = Cache(folder=case / "cache")
    store.save(store.key(trace), read.read_trace(trace, cache=False))
    [entry] = store.folder.iterdir()
    if rng.random() < 0.9:
        file = CacheFile.read(entry)
        for _ in range(rng.choice((1, 1, 2, 4))):
            rng.choice(_OF_FILES)(rng, file)
        file.write(entry, _layout(rng, file) if rng.random() < 0.1 else None)
    else:
        rng.choice(_OF_BYTES)(rng, entry)
    return case


def drive(path: Path, work: Path) -> str:
    """Through a copy: a refused entry is written anew."""
    from fuzz.drive import drive as drive_trace

    copied = shutil.copytree(path, work / "copied")
    os.environ["STEPSCOPE_CACHE_DIR"] = str(copied / "cache")
    read._CACHE_FROM_BYTES = 0
    trace = copied / "trace.json"
    broken = find_inconsistency(read.read_trace(trace))
    assert broken is None, broken
    return drive_trace(trace, work, cache=True)


@cache
def _trace(name: str) -> bytes:
    return gzip.decompress((GOLDEN / f"{name}.json.gz").read_bytes())


def _column(rng: Random, file: CacheFile) -> tuple[tuple[str, str], Any]:
    filled = [name for name, values in file.columns.items() if len(values)]
    name = rng.choice(filled or list(file.columns))
    return name, file.columns[name]


def _places(rng: Random, values: Any) -> Any:
    count = rng.choice((1, 1, 2, max(1, len(values) // 2), len(values)))
    return [rng.randrange(len(values)) for _ in range(count)] if len(values) else []


def _flipped(rng: Random, file: CacheFile) -> None:
    name, values = _column(rng, file)
    data = bytearray(values.tobytes())
    for place in _places(rng, data):
        data[place] ^= 1 << rng.randrange(8)
    file.columns[name] = np.frombuffer(bytes(data), values.dtype).copy()


def _odd_numbers(rng: Random, file: CacheFile) -> None:
    _, values = _column(rng, file)
    limits = np.iinfo(values.dtype) if values.dtype.kind == "i" else np.iinfo(np.int8)
    near = (-2, -1, 0, 1, len(str(file.head.get("strings"))), len(values) - 1, len(values))
    number = rng.choice((limits.min, limits.max, limits.max - 1, limits.min + 1, *near))
    number = min(max(int(number), int(limits.min)), int(limits.max))
    values[_places(rng, values)] = number


def _shuffled(rng: Random, file: CacheFile) -> None:
    _, values = _column(rng, file)
    np.random.default_rng(rng.getrandbits(32)).shuffle(values)


def _another_columns(rng: Random, file: CacheFile) -> None:
    name, values = _column(rng, file)
    _, others = _column(rng, file)
    file.columns[name] = np.resize(others, len(values)).astype(values.dtype)


def _another_length(rng: Random, file: CacheFile) -> None:
    name, values = _column(rng, file)
    file.columns[name] = np.resize(values, rng.choice((0, 1, len(values) - 1, 2 * len(values))))


def _another_type(rng: Random, file: CacheFile) -> None:
    name, values = _column(rng, file)
    file.columns[name] = values.astype(rng.choice(("i1", "i2", "u8", "f4", "f8", "S8", "c16", "?")))


def _all_rows_of_a_table(rng: Random, file: CacheFile) -> None:
    """A consistent change: rows left out, or in another order."""
    table = rng.choice(("host", "device", "memory"))
    rows = len(next(values for (of, _), values in file.columns.items() if of == table))
    kept = rng.choice(([], list(range(rows - 1)), list(range(rows))[::-1], list(range(rows // 2))))
    for (of, name), values in file.columns.items():
        if of == table:
            file.columns[of, name] = values[[row for row in kept if row < len(values)]]


def _head(rng: Random, file: CacheFile) -> None:
    damaged = damage(rng, file.head, rng.randrange(1, 4))
    file.head = damaged if isinstance(damaged, dict) else file.head


def _head_field(rng: Random, file: CacheFile) -> None:
    name = rng.choice(list(file.head) or ["key"])
    if rng.random() < 0.2:
        file.head.pop(name, None)
    elif rng.random() < 0.5 and isinstance(file.head.get(name), list):
        items = file.head[name]
        rng.choice((items.clear, items.reverse, lambda: items.append(odd_value(rng))))()
    else:
        file.head[name] = odd_value(rng)


def _layout(rng: Random, file: CacheFile) -> list[list[Any]]:
    layout = file.layout()
    row = rng.choice(layout)
    row[rng.randrange(5)] = odd_value(rng)
    rng.choice((lambda: None, layout.reverse, layout.pop, lambda: layout.append(list(row))))()
    return layout


def _head_bytes(rng: Random, entry: Path) -> None:
    """Any bytes as the head, with the right checksum."""
    data = entry.read_bytes()
    end = 34 + int.from_bytes(data[18:26], "little")
    head = bytearray(data[34:end])
    for _ in range(rng.randrange(1, 5)):
        head[rng.randrange(len(head))] = rng.randrange(256)
    write_raw(entry, bytes(head), data[end + -end % ALIGN :])


def _any_bytes(rng: Random, entry: Path) -> None:
    data = bytearray(entry.read_bytes())
    for _ in range(rng.randrange(1, 9)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    entry.write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])


def _nested_head(rng: Random, entry: Path) -> None:
    write_raw(entry, rng.choice((b"[" * 10**5, b'{"key":' * 10**5, json.dumps("x").encode())), b"")


_OF_FILES = (
    *(_flipped, _flipped, _odd_numbers, _odd_numbers, _shuffled, _another_columns),
    *(_another_length, _another_type, _all_rows_of_a_table, _head, _head_field),
)
_OF_BYTES = (_head_bytes, _any_bytes, _nested_head)
