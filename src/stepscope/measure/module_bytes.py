"""The bytes that modules keep for backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.measure.saved_tensors import OUTSIDE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stepscope.measure.saved_tensors import Saved
    from stepscope.measure.storages import Key

_MOST_MODULES = 200
_NOWHERE = "(outside modules)"


def sum_by_module(live: Mapping[Key, Saved]) -> dict[int, tuple[int, int]]:
    """Bytes and tensors, by the number of the module that saved them."""
    sums: dict[int, tuple[int, int]] = {}
    for saved in live.values():
        size, tensors = sums.get(saved.module, (0, 0))
        sums[saved.module] = (size + saved.size_bytes, tensors + saved.tensors)
    return sums


def rank_modules(
    by_module: Mapping[int, tuple[int, int]], names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Largest first; small ones of a very large model are one row."""
    sums: dict[str, tuple[int, int]] = {}
    for module, (size, tensors) in by_module.items():
        name = _NOWHERE if module == OUTSIDE else names.get(module, "(unnamed)")
        before = sums.get(name, (0, 0))
        sums[name] = (before[0] + size, before[1] + tensors)
    ranked = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))
    rest = ranked[_MOST_MODULES:]
    if rest:
        bytes_left, tensors_left = (sum(item[1][place] for item in rest) for place in (0, 1))
        name = f"({len(rest)} more modules)"
        ranked = [*ranked[:_MOST_MODULES], (name, (bytes_left, tensors_left))]
    return [{"module": name, "bytes": size, "tensors": tensors} for name, (size, tensors) in ranked]
