"""Kinds of input: a file here is a kind.

Each has `mutate(rng, folder) -> Path`, which writes one damaged input under `folder`, and may have
`drive(path, work)` where such an input is not for `stepscope explain`.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

    Mutate = Callable[[Random, Path], Path]
    Drive = Callable[[Path, Path], str]

KINDS = sorted(module.name for module in pkgutil.iter_modules(__path__))


def mutator(kind: str) -> Mutate:
    found: Mutate = _file(kind).mutate
    return found


def driver(kind: str) -> Drive:
    from fuzz.drive import drive

    found: Drive = getattr(_file(kind), "drive", drive)
    return found


def _file(kind: str) -> Any:
    return import_module(f"{__name__}.{kind}")
