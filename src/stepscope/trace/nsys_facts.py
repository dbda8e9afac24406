"""What an Nsight Systems export says about itself: rank, devices, product, start of its clock.

Of the recorded environment, which may hold secrets, only RANK and WORLD_SIZE are taken.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from stepscope.records.limits import MAX_EVENT_BYTES, MAX_RANKS
from stepscope.records.trace import ABSENT, Device
from stepscope.trace.assemble import Facts
from stepscope.trace.nsys_tables import LATEST_NS
from stepscope.trace.plausible import MAX_DEVICES, is_whole

if TYPE_CHECKING:
    from stepscope.trace.columns import Collector
    from stepscope.trace.database import Database
    from stepscope.trace.nsys_tables import NsysTables
    from stepscope.trace.plausible import OddValues

_PRODUCT = ("EXPORT_PRODUCT_NAME", "EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION")
_RANK_VARIABLE = re.compile(r'(RANK|WORLD_SIZE)="?(\d{1,9})"?')
_ABSOLUTE_FROM_NS = 10**18  # 2001; `nsys export --ts-normalize` has added the start already


def describe_export(database: Database, tables: NsysTables) -> Facts:
    """Its rank is unknown if several processes share the export."""
    ranks = {} if len(tables.processes()) > 1 else _rank_variables(database)
    product = database.records("META_DATA_EXPORT", "name", "value")
    return Facts(
        kind="cuda",
        rank=ranks.get("RANK"),
        world_size=ranks.get("WORLD_SIZE"),
        devices=_devices(database, tables.columns.odd),
        base_ns=_session_start(database, tables.columns),
        others={name: str(value) for name, value in product if name in _PRODUCT},
    )


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
