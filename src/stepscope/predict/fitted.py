"""Read the numbers that predictions were fitted with: data/*.json, a row for each number or table.

A row says where its number was measured and what makes it again. Physical constants and thresholds
of algorithms stay in the code that uses them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

DATA = Path(__file__).with_name("data")
Value = TypeVar("Value")


class FittedNumber(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str  # begins with the name of its file
    value: msgspec.Raw  # a number, or a table of numbers
    unit: str
    range: str  # where it holds
    measured_on: str  # device, torch, date
    observations: str
    script: str  # makes it again


@cache
def read_fitted(file: str) -> dict[str, FittedNumber]:
    """Return the rows of one file of data/ by name, read when a module first needs one."""
    text = Path(__file__).with_name("data").joinpath(f"{file}.json").read_bytes()
    return {row.name: row for row in msgspec.json.decode(text, type=list[FittedNumber])}


def table(name: str, kind: type[Value]) -> Value:
    """Return a row's value, decoded as this type."""
    return msgspec.json.decode(read_fitted(name.partition(".")[0])[name].value, type=kind)


def fitted(name: str) -> float:
    return table(name, float)
