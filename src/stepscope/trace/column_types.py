"""The types of the columns of a Trace, as records/trace.py declares them."""

from __future__ import annotations

from typing import Any

import numpy as np

_CODES = {"Int8": "<i1", "Int32": "<i4", "Int64": "<i8"}


def column_types(table: type[Any]) -> dict[str, np.dtype[Any]]:
    return {name: np.dtype(_CODES[table.__annotations__[name]]) for name in table.__struct_fields__}
