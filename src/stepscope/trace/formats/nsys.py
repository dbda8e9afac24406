"""Read an Nsight Systems SQLite export (`nsys export --type sqlite`) into a Trace; refuse
databases of other tools. Only tables and columns that exist are read.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from stepscope.errors import UnreadableInputError
from stepscope.records.quality import MAX_EVENT_BYTES, MAX_RANKS, Note
from stepscope.records.trace import ABSENT, Device, Trace
from stepscope.text.words import counted
from stepscope.trace.files import Progress, unreadable_error
from stepscope.trace.formats.columns import Collector, Facts, assemble
from stepscope.trace.formats.nsys_tables import LATEST_NS, UNNAMED, NsysTables, holds_events
from stepscope.trace.formats.plausible_values import MAX_DEVICES, OddValues, is_whole
from stepscope.trace.formats.sqlite import MAX_CHARACTERS, Database

# Tables and columns differ by version and by what was traced, so only those that exist are read.

NAME = "nsys"


def read_nsys(path: Path, progress: Progress | None = None) -> Trace:
    """Read, link and describe one export. Raises UnreadableInputError when it holds no events."""
    try:
        database = Database(path)
    except sqlite3.Error as error:
        raise _damaged(path, f"its list of tables: {error}") from None
    except OSError as error:
        raise unreadable_error(path, error) from None
    with closing(database):
        _refuse_foreign(path, database)
        database.watch(filter(holds_events, database.tables), progress)
        tables = NsysTables(database)
        tables.read()
        _refuse_empty(path, database, tables)
        # Its rank is unknown if several processes share the export.
        ranks = {} if len(tables.processes()) > 1 else _rank_variables(database)
        product = database.records("META_DATA_EXPORT", "name", "value")
        facts = Facts(
            kind="cuda",
            rank=ranks.get("RANK"),
            world_size=ranks.get("WORLD_SIZE"),
            devices=_devices(database, tables.columns.odd),
            base_ns=_session_start(database, tables.columns),
            others={name: str(value) for name, value in product if name in _PRODUCT},
        )
    return assemble(
        path=str(path),
        source=NAME,
        columns=tables.columns,
        facts=facts,
        quality=tuple(_notes(database, tables)),
    )


def _refuse_foreign(path: Path, database: Database) -> None:
    tables = database.tables
    if "StringTable" in tables and "StringIds" not in tables:
        raise UnreadableInputError(
            f"{path} is a database of nvprof or the Visual Profiler: record the run with "
            "`nsys profile --trace cuda,nvtx`, then `nsys export --type sqlite`"
        )
    if any(map(holds_events, tables)):
        return
    if database.damaged:
        raise _damaged(path, _where(database))
    if computed := sorted(filter(holds_events, database.computed)):
        raise UnreadableInputError(
            f"{path}: {', '.join(computed[:6])} is a view or a virtual table, and only plain "
            "tables are read: export the report again with `nsys export --type sqlite`"
        )
    if "META_DATA_EXPORT" in tables or "StringIds" in tables:
        raise UnreadableInputError(
            f"{path} is an Nsight Systems export without CUDA or NVTX events: record the run with "
            "`nsys profile --trace cuda,nvtx`"
        )
    seen = ", ".join(sorted(tables)[:6]) + (", ..." if len(tables) > 6 else "")
    raise UnreadableInputError(
        f"{path} is a SQLite database of another tool (tables: {seen or 'none'}); "
        "expected an export of `nsys export --type sqlite`"
    )


def _refuse_empty(path: Path, database: Database, tables: NsysTables) -> None:
    columns, losses = tables.columns, tables.losses
    if columns.known_rows() and set(columns.names) != {UNNAMED}:
        return
    if database.damaged:
        raise _damaged(path, _where(database))
    if losses.malformed:
        raise UnreadableInputError(
            f"{path}: none of its events ({columns.events:,}) is usable ({losses.reasons})"
        )
    if columns.known_rows():
        raise UnreadableInputError(
            f"{path} has no names for its {counted(columns.events, 'event')} (table StringIds): "
            "export it again with all tables"
        )
    raise UnreadableInputError(
        f"{path} holds no CUDA calls, device work or NVTX ranges: was the capture range ever "
        "entered, and was `--trace cuda,nvtx` given to `nsys profile`?"
    )


def _damaged(path: Path, where: str) -> UnreadableInputError:
    return UnreadableInputError(
        f"{path} is damaged, encrypted or cut off and cannot be read ({where}): "
        "export it again from the report with `nsys export --type sqlite`"
    )


def _where(database: Database) -> str:
    return "; ".join(f"table {table}: {error}" for table, error in database.damaged.items())


def _notes(database: Database, tables: NsysTables) -> Iterator[Note]:
    yield from tables.losses.malformed_notes()
    if database.damaged:
        yield Note(
            id="truncated",
            detail=f"the database is damaged or cut off ({_where(database)}); "
            f"read before that: {counted(tables.columns.events, 'event')}",
            count=len(database.damaged),
        )
    if left_out := sorted(filter(holds_events, database.computed)):
        yield Note(
            id="computed-tables",
            detail=f"left out: {', '.join(left_out[:8])}: a view or a virtual table; only plain "
            "tables are read",
            count=len(left_out),
        )
    if database.unfinished:
        yield Note(
            id="unfinished-export",
            detail=f"{database.unfinished} lies next to the database and is not read; export the "
            "report again if events are missing",
        )
    if database.cut_texts:
        yield Note(
            id="cut-texts",
            detail=f"{counted(database.cut_texts, 'text')} of the file cut after "
            f"{MAX_CHARACTERS:,} characters",
            count=database.cut_texts,
        )
    if tables.unnamed:
        yield Note(
            id="unnamed",
            detail=f"the file has no names for {counted(tables.unnamed, 'event')}",
            count=tables.unnamed,
        )
    pids = tables.processes()
    if len(pids) > 1:
        yield Note(
            id="several-processes",
            detail=f"{len(pids)} processes in one export (pids {', '.join(map(str, pids[:8]))}) "
            "are read as one. To compare them, record each rank separately: "
            "`nsys profile -o rank-%q{RANK}`",
            count=len(pids),
        )


# What an Nsight Systems export says about itself: rank, devices, product, start of its clock.
#
# Of the recorded environment, which may hold secrets, only RANK and WORLD_SIZE are taken.

_PRODUCT = ("EXPORT_PRODUCT_NAME", "EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION")
_RANK_VARIABLE = re.compile(r'(RANK|WORLD_SIZE)="?(\d{1,9})"?')
_ABSOLUTE_FROM_NS = 10**18  # 2001; `nsys export --ts-normalize` has added the start already


def _rank_variables(database: Database) -> dict[str, int]:
    """RANK and WORLD_SIZE from the environment that the process was started with."""
    variables = {}
    for name, value in database.records("META_DATA_CAPTURE", "name", "value"):
        if str(name).endswith("ENVIRONMENT_VARIABLE") and isinstance(value, str):
            match = _RANK_VARIABLE.fullmatch(value)
            if match:
                variables[match[1]] = int(match[2])
    return {name: number for name, number in variables.items() if number <= MAX_RANKS}


def _devices(database: Database, odd: OddValues) -> tuple[Device, ...]:
    table, columns = "TARGET_INFO_GPU", ("id", "name", "totalMemory", "smCount")
    if not database.columns(table):  # before mid 2021
        table = "TARGET_INFO_CUDA_GPU"
        columns = ("deviceId", "name", "globalMemorySize", "numMultiprocessors")

    def whole(column: str, value: Any, limit: int) -> int:
        if value is not None and not is_whole(value, limit):
            odd.add(f"{table}.{column}", 1, value)
        return value if is_whole(value, limit) else ABSENT

    return tuple(
        Device(
            id=whole(columns[0], number, MAX_DEVICES),
            name=name if isinstance(name, str) else "",
            memory_bytes=whole(columns[2], memory, MAX_EVENT_BYTES),
            multiprocessors=whole(columns[3], processors, MAX_DEVICES),
        )
        for number, name, memory, processors in database.records(table, *columns)
    )


def _session_start(database: Database, columns: Collector) -> int:
    rows = database.records("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
    value = rows[0][0] if rows else None
    if not isinstance(value, int) or not 0 < value < LATEST_NS:
        return 0
    starts = columns.device.column("start_ns"), columns.host.column("start_ns")
    absolute = any((column > _ABSOLUTE_FROM_NS).mean() > 0.5 for column in starts if len(column))
    return 0 if absolute else value
