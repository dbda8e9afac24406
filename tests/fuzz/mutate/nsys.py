"""Nsight exports with odd values, types, schemas, views, triggers, and damaged pages."""

from __future__ import annotations

import copy
import sqlite3
from contextlib import closing, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from fuzz.odd_json import TEXTS
from nsys_export import (
    BACKWARD,
    DRIVER,
    GRAPH,
    KERNEL,
    MAIN,
    MEMCPY,
    MEMSET,
    NEW,
    NVTX,
    OLD,
    RUNTIME,
    SYNC,
    Export,
    small,
    thread,
)

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

_EVENTS = (KERNEL, MEMCPY, MEMSET, RUNTIME, DRIVER, SYNC, GRAPH, NVTX, "PROFILER_OVERHEAD")
_NUMBERS = [
    *(0, 1, -1, 2, 7, 59, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**44, 2**53 + 1),
    *(
        2**60,
        2**62 - 1,
        2**62,
        2**63 - 1,
        -(2**63),
        -(2**62),
        -(2**31),
        10**18,
        1_700_000_000 * 10**9,
    ),
]
_OTHERS: list[Any] = [None, 0.5, -1.0, 1e300, float("inf"), b"", b"\xff\x00", b"1" * 5000, *TEXTS]
_RANGE_TEXTS = (
    "aten::mm, seq = 5, op_id = 1, sizes = [[4, 4], [4, 4]]",
    "aten::mm, seq = 99999999999999999999, op_id = 1",
    "aten::conv2d, seq = 3, op_id = 2, sizes = [[9223372036854775807, 4], [2]]",
    "aten::linear, op_id = 2, sizes = [[-1, 4], []]",
    "aten::addmm, seq = 999999999999999999, op_id = 4, sizes = [[[[[[[]]]]]]]",
    "AddmmBackward0, seq = 12, op_id = 9, sizes = [",
    "Optimizer.step#Adam.step",
    "ProfilerStep#-1",
    "ProfilerStep#99999999999999999999999",
    "DataLoader.__next__",
    "nccl:all_reduce, op_id = 3",
    ", seq = , op_id = , sizes = ",
    "<script>alert(1)</script>",
    "\x1b[31mred",
    "{{ 7 * 7 }}",
)
_ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT {columns} FROM n"


@cache
def _seeds() -> tuple[Export, ...]:
    export = _training(2)
    export.call("cudaLaunchKernel_v7000", (1250, 1280), thread(200, 201), 1)
    export.kernel("other", (1600, 1700), 1, pid=200)
    return small(), _training(4), _training(1), export, _ranges_only()


def _training(steps: int) -> Export:
    """Steps of operators with kernels, a copy, a wait, a collective and a whole graph."""
    export = small()
    correlation = 100
    for step in range(steps):
        begin = 20_000 + step * 10_000
        export.range(f"ProfilerStep#{step + 2}", (begin, begin + 9_900), MAIN)
        for place in range(12):
            start = begin + 100 + place * 700
            on = BACKWARD if place > 6 else MAIN
            name = f"aten::mm, seq = {step * 12 + place}, op_id = {correlation}"
            shapes = f", sizes = [[{8 << place % 4}, 16], [16, 8]]"
            export.range(name + shapes * (place % 2), (start, start + 500), on)
            export.call("cudaLaunchKernel_v7000", (start + 50, start + 150), on, correlation)
            kind = "ncclDevKernel_AllReduce_Sum_f32" if place == 9 else f"gemm_{place % 3}"
            stream = 13 if place == 9 else 7
            export.kernel(kind, (start + 200, start + 800), correlation, streamId=stream)
            correlation += 1
        end = begin + 9_000
        export.call("cudaMemcpyAsync_v3020", (end, end + 50), MAIN, correlation)
        kinds = {"copyKind": 2, "srcKind": 2, "dstKind": 1}
        export.device(MEMCPY, (end + 60, end + 160), correlation, bytes=1 << 20, **kinds)
        export.call("cudaGraphLaunch_v10000", (end + 200, end + 220), MAIN, correlation + 1)
        export.device(GRAPH, (end + 250, end + 400), correlation + 1, graphId=4, graphExecId=5)
        export.call("cudaStreamSynchronize_v3020", (end + 420, end + 600), MAIN, correlation + 2)
        export.device(SYNC, (end + 420, end + 590), correlation + 2, syncType=2)
        correlation += 3
    for value in ('RANK="1"', 'WORLD_SIZE="4"'):
        export.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=value)
    return export


def _ranges_only() -> Export:
    export = _training(2)
    export.tables = {t: rows for t, rows in export.tables.items() if not t.startswith("CUPTI")}
    return export


def mutate(rng: Random, folder: Path) -> Path:
    export = copy.deepcopy(rng.choice(_seeds()))
    schema = dict(rng.choice((NEW, NEW, OLD)))
    for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
        rng.choice(_OF_ROWS)(rng, export)
    if rng.random() < 0.3:
        rng.choice(_OF_SCHEMAS)(rng, schema)
    path = folder / rng.choice(("run.sqlite", "run.sqlite", "a b%20?.db"))
    _write(rng, export, schema, path)
    if rng.random() < 0.4:
        with closing(sqlite3.connect(path)) as database, suppress(sqlite3.Error, IndexError):
            rng.choice(_OF_DATABASES)(rng, database)
            database.commit()
    if rng.random() < 0.3:
        path.write_bytes(rng.choice(_OF_BYTES)(rng, path.read_bytes()))
    if rng.random() < 0.03:
        path.with_name(path.name + rng.choice(("-wal", "-journal"))).write_bytes(rng.randbytes(99))
    return path


def _write(rng: Random, export: Export, schema: dict[str, str], path: Path) -> None:
    """Without types, so that SQLite keeps every value as it is."""
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA page_size={rng.choice((512, 1024, 4096, 65536))}")
        database.execute(f"PRAGMA encoding='{rng.choice(('UTF-8', 'UTF-8', 'UTF-16le'))}'")
        typed = rng.choice(("", " INTEGER", " TEXT", " REAL")) if rng.random() < 0.2 else ""
        for table in [table for table in export.tables if table in schema]:
            columns = schema[table].split()
            tail = " WITHOUT ROWID" if rng.random() < 0.03 else ""
            first = f'"{columns[0]}" PRIMARY KEY' if tail else f'"{columns[0]}"{typed}'
            rest = "".join(f', "{c}"{typed}' for c in columns[1:])
            with suppress(sqlite3.Error):
                database.execute(f"CREATE TABLE {table} ({first}{rest}){tail}")
                for row in export.tables[table]:
                    _insert(database, table, row, columns)
        database.commit()


def _insert(database: Any, table: str, row: dict[str, Any], columns: list[str]) -> None:
    values = [row.get(column) for column in columns]
    with suppress(sqlite3.Error, OverflowError, UnicodeEncodeError):
        database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", values)


def _odd(rng: Random) -> Any:
    pick = rng.random()
    if pick < 0.5:
        return rng.choice(_NUMBERS)
    if pick < 0.6:
        return rng.choice((1, -1)) * rng.getrandbits(rng.randrange(1, 63))
    return rng.choice(_OTHERS)


def _table(rng: Random, export: Export, names: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    there = [table for table in export.tables if not names or table in names]
    return export.tables[rng.choice(there)] if there else []


def _some(rng: Random, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not rows:
        return []
    return rng.choice(([rng.choice(rows)], rng.sample(rows, len(rows) // 2), rows))


def _values(rng: Random, export: Export) -> None:
    rows = _table(rng, export)
    for row in _some(rng, rows):
        row[rng.choice(list(row))] = _odd(rng)


def _one_column(rng: Random, export: Export) -> None:
    rows = _table(rng, export)
    if rows:
        column, value = rng.choice(list(rows[0])), _odd(rng)
        for row in _some(rng, rows):
            row[column] = value


def _times(rng: Random, export: Export) -> None:
    change = rng.choice(
        (
            lambda start, end: (end, start),
            lambda start, _end: (start, start),
            lambda start, end: (-start, -end),
            lambda start, end: (start * 10**6, end * 10**6),
            lambda start, end: (start + 10**18, end + 10**18),
            lambda _start, _end: (0, 0),
            lambda start, _end: (start, None),
            lambda start, end: (start, end + 10**9 * 86_400 * rng.randrange(200)),
            lambda _start, _end: (rng.randrange(10**6), rng.randrange(10**6)),
            lambda _start, _end: (2**61, 2**61 + 5),
            lambda _start, _end: (1000, 9000),
        )
    )
    for row in _some(rng, _table(rng, export, _EVENTS)):
        with suppress(TypeError, KeyError):
            row["start"], row["end"] = change(row["start"], row["end"])


def _order(rng: Random, export: Export) -> None:
    rows = _table(rng, export, _EVENTS)
    rng.shuffle(rows)
    rows.extend(copy.deepcopy(rows[: rng.randrange(40)]))


def _without_a_table(rng: Random, export: Export) -> None:
    for _ in range(rng.randrange(1, 4)):
        if len(export.tables) > 1:
            del export.tables[rng.choice(list(export.tables))]


def _without_rows(rng: Random, export: Export) -> None:
    rows = _table(rng, export)
    del rows[rng.randrange(len(rows) + 1) :]


def _range_texts(rng: Random, export: Export) -> None:
    for row in _some(rng, export.tables.get(NVTX, [])):
        row["text"] = rng.choice(_RANGE_TEXTS)


def _strings(rng: Random, export: Export) -> None:
    rows = export.tables.get("StringIds", [])
    for row in _some(rng, rows):
        row[rng.choice(("id", "value"))] = rng.choice((_odd(rng), rng.choice(_RANGE_TEXTS)))


def _facts(rng: Random, export: Export) -> None:
    value = rng.choice(("RANK=9", 'WORLD_SIZE="0"', "RANK=", "RANK=-1", "WORLD_SIZE=999999999"))
    export.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value=value)
    export.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value=_odd(rng))
    export.add("TARGET_INFO_GPU", id=_odd(rng), name=_odd(rng), totalMemory=_odd(rng))
    export.add("TARGET_INFO_CUDA_DEVICE", gpuId=_odd(rng), cudaId=0, pid=100)
    export.tables["TARGET_INFO_SESSION_START_TIME"] = [{"utcEpochNs": _odd(rng)}]


def _ids(rng: Random, export: Export) -> None:
    column = rng.choice(("correlationId", "globalTid", "globalPid", "streamId", "deviceId"))
    numbers = [rng.choice(_NUMBERS) for _ in range(rng.randrange(1, 6))]
    for rows in export.tables.values():
        for row in rows:
            if column in row and rng.random() < 0.7:
                row[column] = rng.choice(numbers)


def _column_gone(rng: Random, schema: dict[str, str]) -> None:
    table = rng.choice(list(schema))
    columns = schema[table].split()
    columns.remove(rng.choice(columns))
    schema[table] = " ".join(columns) or "x"


def _column_renamed(rng: Random, schema: dict[str, str]) -> None:
    table = rng.choice(list(schema))
    columns = schema[table].split()
    place = rng.randrange(len(columns))
    columns[place] = rng.choice((columns[place].upper(), "rowid", "_rowid_", "x", "select", '""'))
    schema[table] = " ".join(columns)


def _columns_shuffled(rng: Random, schema: dict[str, str]) -> None:
    table = rng.choice(list(schema))
    columns = schema[table].split()
    rng.shuffle(columns)
    schema[table] = " ".join(columns)


def _names(database: Any) -> list[str]:
    return [name for (name,) in database.execute("SELECT name FROM sqlite_master")]


def _columns(database: Any, table: str) -> list[str]:
    return [row[1] for row in database.execute(f"PRAGMA table_info({table})")]


def _view(rng: Random, database: Any) -> None:
    """Under a table's name; the table is renamed or gone."""
    table = rng.choice([name for name in _names(database) if name in (*_EVENTS, "StringIds")])
    columns = _columns(database, table)
    database.execute(f"ALTER TABLE {table} RENAME TO moved")
    numbers = ", ".join(f'i AS "{column}"' for column in columns)
    query = rng.choice(
        (
            "SELECT * FROM moved",
            _ENDLESS.format(columns=numbers),
            "SELECT a.* FROM moved a, moved b, moved c, moved d, moved e, moved f",
            "SELECT " + numbers.replace("i AS", "randomblob(100000000) AS") + " FROM moved",
            f"SELECT * FROM {table}",
        )
    )
    database.execute(f"CREATE VIEW {table} AS {query}")
    if rng.random() < 0.5:  # the list of tables calls it one
        database.execute("PRAGMA writable_schema=ON")
        database.execute("UPDATE sqlite_master SET type = 'table' WHERE type = 'view'")


def _virtual(rng: Random, database: Any) -> None:
    table = rng.choice([name for name in _names(database) if name in _EVENTS])
    columns = ", ".join(f'"{column}"' for column in _columns(database, table))
    database.execute(f"DROP TABLE {table}")
    database.execute(f"CREATE VIRTUAL TABLE {table} USING fts5({columns})")


def _computed(rng: Random, database: Any) -> None:
    table = rng.choice([name for name in _names(database) if name in _EVENTS])
    kind = rng.choice(("VIRTUAL", "VIRTUAL"))
    column = rng.choice(("graphNodeId", "bytes", "extra", "gridX"))
    expression = rng.choice(("abs(start)", "hex(zeroblob(100000000))", "start / 0"))
    with suppress(sqlite3.Error):
        database.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    database.execute(f"ALTER TABLE {table} ADD COLUMN {column} AS ({expression}) {kind}")


def _triggers_and_indices(rng: Random, database: Any) -> None:
    table = rng.choice([name for name in _names(database) if name in _EVENTS])
    database.execute(f"CREATE TRIGGER t AFTER INSERT ON {table} BEGIN DELETE FROM {table}; END")
    columns = _columns(database, table)[: rng.randrange(1, 30)]
    database.execute(f"CREATE INDEX i ON {table} ({', '.join(columns)})")


def _schema_rows(rng: Random, database: Any) -> None:
    """What the list of tables says, without what is in them."""
    database.execute("PRAGMA writable_schema=ON")
    table = rng.choice(_names(database))
    endless = _ENDLESS.format(columns="i AS start, i AS end")
    change, value = rng.choice(
        (
            ("rootpage = ?", rng.choice((0, 1, 2, 3, 99, 2**31, -1, None, "x"))),
            ("type = ?", rng.choice(("view", "index", "table", "", None, 5))),
            ("name = ?", rng.choice((KERNEL, NVTX, "x\0y", "", None, 5, b"\xff"))),
            ("tbl_name = ?", rng.choice((KERNEL, "x", None))),
            ("sql = ?", f"CREATE VIEW {table} AS {endless}"),
            ("sql = ?", rng.choice(("", None, "CREATE TABLE", "DROP TABLE StringIds", b"\xff", 1))),
            ("sql = replace(sql, ?, 'start')", rng.choice(("end", "globalPid", "value"))),
        )
    )
    database.execute(f"UPDATE sqlite_master SET {change} WHERE name = ?", (value, table))


def _invalid_text(rng: Random, database: Any) -> None:
    table, column = rng.choice(
        (("StringIds", "value"), (NVTX, "text"), ("TARGET_INFO_GPU", "name"))
    )
    value = rng.choice(("x'fffe80'", "x'00'", "x'61ed a080'".replace(" ", ""), "zeroblob(3000000)"))
    value = rng.choice((value, "replace(hex(zeroblob(100000)), '0', 'ab')"))
    database.execute(f"UPDATE {table} SET {column} = CAST({value} AS TEXT)")


def _write_ahead(_: Random, database: Any) -> None:
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("CREATE TABLE late (x)")


def _flips(rng: Random, data: bytes) -> bytes:
    spoilt = bytearray(data)
    for _ in range(rng.randrange(1, 30)):
        spoilt[rng.randrange(16, len(spoilt))] = rng.randrange(256)
    return bytes(spoilt)


def _stretch(rng: Random, data: bytes) -> bytes:
    spoilt = bytearray(data)
    place, size = rng.randrange(16, len(spoilt)), rng.choice((2, 40, 512, 5000))
    size = min(size, len(spoilt) - place)
    source = rng.randrange(len(spoilt) - size + 1)
    fill = (bytes(size), b"\xff" * size, rng.randbytes(size), bytes(spoilt[source : source + size]))
    spoilt[place : place + size] = rng.choice(fill)
    return bytes(spoilt)


def _cut(rng: Random, data: bytes) -> bytes:
    return data[: rng.randrange(16, len(data))]


def _header(rng: Random, data: bytes) -> bytes:
    """Page size, versions, encoding, sizes: the first hundred bytes."""
    spoilt = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        place = rng.choice((16, 17, 18, 19, 20, 21, 22, 23, 28, 31, 44, 47, 52, 56, 59, 92, 96))
        spoilt[place] = rng.choice((0, 1, 2, 3, 4, 255))
    return bytes(spoilt)


def _pages(rng: Random, data: bytes) -> bytes:
    """Pages in each other's places."""
    size = int.from_bytes(data[16:18], "big")
    size = 65536 if size == 1 else size
    pages = [data[at : at + size] for at in range(0, len(data), size)]
    for _ in range(rng.randrange(1, 4)):
        if len(pages) > 2:
            one, other = rng.randrange(1, len(pages)), rng.randrange(1, len(pages))
            pages[one] = pages[other]
    return b"".join(pages)


_OF_ROWS = (
    *(_values, _values, _one_column, _one_column, _times, _times, _order, _without_a_table),
    *(_without_rows, _range_texts, _strings, _facts, _ids),
)
_OF_SCHEMAS = (_column_gone, _column_renamed, _columns_shuffled)
_OF_DATABASES = (
    *(_view, _view, _virtual, _computed, _triggers_and_indices, _schema_rows, _schema_rows),
    *(_invalid_text, _write_ahead),
)
_OF_BYTES = (_flips, _flips, _stretch, _cut, _header, _pages)
