"""Which blocks of a model would be recomputed: by transformers' own mark, else repeated modules."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.backward_graph import CapturedBackward, GraphModule

_FEWEST = 3  # modules of one type in one list
OUTSIDE = -1


def find_block_paths(modules: Sequence[GraphModule]) -> list[str]:
    """Those that transformers checkpoints, outermost; else the type of composed module that stands
    several times in one list and holds the most parameters, of equals the outer ones."""
    marked = [module.path for module in modules if module.recomputes]
    if marked:
        return [path for path in marked if not _is_inside(path, marked)]
    lists: dict[tuple[str, str], list[GraphModule]] = defaultdict(list)
    parents = {module.path.rpartition(".")[0] for module in modules}
    for module in modules:
        lists[module.path.rpartition(".")[0], module.type].append(module)
    repeated = [
        blocks
        for blocks in lists.values()
        if len(blocks) >= _FEWEST and any(block.path in parents for block in blocks)
    ]
    held = [sum(block.elements for block in blocks) for blocks in repeated]
    if not held or not max(held):
        return []
    return [block.path for block in repeated[held.index(max(held))]]


def block_of_nodes(graph: CapturedBackward) -> list[int]:
    """The number of each node's block, OUTSIDE for none."""
    numbers = {path: number for number, path in enumerate(find_block_paths(graph.modules))}
    of_module = [_number(module.path, numbers) for module in graph.modules]
    blocks = [of_module[node.module] if node.module >= 0 else OUTSIDE for node in graph.nodes]
    return _with_shared_modules(graph, blocks)


def _with_shared_modules(graph: CapturedBackward, blocks: list[int]) -> list[int]:
    """A module that several blocks share, such as one activation for all, has a single path, which
    may lie outside of them. A node between two of the same block was made inside it."""
    whole = list(blocks)
    before = OUTSIDE
    waiting: list[int] = []  # nodes since the last one of a block
    for place, block in enumerate(blocks):
        if graph.nodes[place].is_leaf:
            continue
        if block == OUTSIDE:
            waiting.append(place)
            continue
        if block == before:
            for inner in waiting:
                whole[inner] = block
        before, waiting = block, []
    return whole


def _number(path: str, numbers: dict[str, int]) -> int:
    while path:
        if path in numbers:
            return numbers[path]
        path = path.rpartition(".")[0]
    return OUTSIDE


def _is_inside(path: str, others: Sequence[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in others)
