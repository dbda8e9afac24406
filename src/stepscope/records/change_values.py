"""Values of changes as users write them: targets of saving memory, consistency of a
parameter server, precisions of timed operators. Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from stepscope.errors import UsageError
from stepscope.text.figures import factor as factor_words
from stepscope.text.figures import percent, size

# What saving memory should reach: as options of `save_memory`, and as the text of a remedy or a
# what-if.
#
#     5%     recomputing adds at most 5% to a step        max_slowdown=0.05
#     0.5    the peak of backward shrinks by half         reduce=0.5
#     12GB   a step needs at most 12 GB                   budget="12GB"
#     2x     twice the batch fits                         batch="2x"
#     max    as little as possible is kept                none of them
#     heavy  matmuls may be repeated, too                heavy=True

EXAMPLES = "5%, 0.5, 12GB, 2x or max, and +heavy if matmuls may be repeated"
_UNITS = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]I?B)?\s*")
_BATCH = re.compile(r"\s*(?:x\s*(\d+\.?\d*)|(\d+\.?\d*)\s*x)\s*", re.IGNORECASE)
_MOST_BATCH = 1e6
_HEAVY = "heavy"


@dataclass(frozen=True, slots=True)
class MemoryTarget:
    """None: no limit; all None: as little as possible."""

    budget_bytes: int | None = None
    reduce: float | None = None
    max_slowdown: float | None = None
    batch: float | None = None  # samples per step over those now
    heavy: bool = False  # also matrix products and convolutions may be repeated

    def most_ns(self, step_ns: int) -> float | None:
        return None if self.max_slowdown is None else self.max_slowdown * step_ns

    @property
    def limits_bytes(self) -> bool:
        return any(limit is not None for limit in (self.budget_bytes, self.reduce, self.batch))

    @property
    def text(self) -> str:
        """Write it as one value of a remedy; several limits are joined by a plus: 5%+12GB."""
        parts = []
        if self.max_slowdown is not None:
            parts.append(f"{100 * self.max_slowdown:g}%")
        if self.reduce is not None:
            parts.append(f"{self.reduce:g}")
        if self.budget_bytes is not None:
            parts.append(f"{self.budget_bytes}B")
        if self.batch is not None:
            parts.append(f"{self.batch:g}x")
        return "+".join([*(parts or ["max"]), *(["heavy"] if self.heavy else [])])

    @property
    def words(self) -> str:
        parts = []
        if self.budget_bytes is not None:
            parts.append(f"at most {size(self.budget_bytes)}")
        if self.reduce is not None:
            parts.append(f"{percent(self.reduce)} less")
        if self.batch is not None:
            parts.append(f"{factor_words(self.batch)} times the batch")
        if self.max_slowdown is not None:
            parts.append(f"at most {percent(self.max_slowdown)} slower")
        limits = ", ".join(parts) or "as little as possible"
        return f"{limits}; matmuls may be repeated" if self.heavy else limits


def read_target(text: str) -> MemoryTarget:
    """Read a remedy's value. Raises ValueError with what to write instead."""
    words = [part.strip() for part in text.split("+")]
    heavy = _HEAVY in words[1:] or words == [_HEAVY]
    parts = [word for word in words if word != _HEAVY] if heavy else words
    if parts in ([], [""], ["max"]):
        return MemoryTarget(heavy=heavy)
    limits: dict[str, float | int] = {}
    for part in parts:
        name, value = _read_part(part)
        if name in limits:
            raise ValueError(f"{text!r} has two limits of one kind: write {EXAMPLES}")
        limits[name] = value
    return MemoryTarget(**limits, heavy=heavy)  # type: ignore[arg-type]


def _read_part(part: str) -> tuple[str, float | int]:
    if part.endswith("%") and (share := _number(part[:-1])) is not None:
        return "max_slowdown", share / 100
    if _BATCH.fullmatch(part):
        return "batch", batch_factor(part)
    share = _number(part)
    if share is not None and 0 < share < 1:
        return "reduce", share
    if share is None and (size_bytes := size_in_bytes(part.upper().removesuffix("B") + "B")):
        return "budget_bytes", size_bytes
    raise ValueError(f"{part!r} is no target: write {EXAMPLES}")


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+\.?\d*|\.\d+", text.strip()) else None


def size_in_bytes(text: str | int) -> int | None:
    """Read "12GB", "500 MiB", "300B" or a number; None where it is no size above zero."""
    plain = str(text).upper()
    if re.fullmatch(r"\s*[\d.]+\s*B\s*", plain):
        plain = plain.replace("B", "")
    matched = _SIZE.fullmatch(plain)
    size_bytes = int(float(matched[1]) * _UNITS[matched[2] or ""]) if matched else 0
    return size_bytes if 0 < size_bytes < 2**62 else None


def batch_factor(text: str | float) -> float:
    """Read "2x", "x2" or 2. Raises ValueError with what to write instead."""
    matched = _BATCH.fullmatch(text) if isinstance(text, str) else None
    if matched:
        value = float(matched[1] or matched[2])
    else:
        value = float(text) if not isinstance(text, str) else 0.0
    if not 0 < value <= _MOST_BATCH:
        raise ValueError(f"{text!r} is no factor of the batch: write '2x'")
    return value


# The four consistency models: how far apart workers may be when one of them reads.
#
# Standard library only: the training process imports this file.

_SPELLING = re.compile(r"(strong|bounded|eventual|weak)(?::(\d{1,9})|\((\d{1,9})\))?", re.ASCII)
_DEFAULT_WINDOW = 8  # clocks that a weak reader may keep its copy


Mode = Literal["strong", "bounded", "eventual", "weak"]


@dataclass(frozen=True, slots=True)
class Consistency:
    """`bound` is in clocks: the largest read gap if bounded, the oldest copy if weak."""

    mode: Mode
    bound: int | None = None

    @classmethod
    def parse(cls, text: str) -> Consistency:
        """Read "strong", "bounded:3", "eventual", "weak" or "weak:8"."""
        spelled = _SPELLING.fullmatch(text.strip())
        if spelled is None:
            raise _unknown(text)
        mode, number = spelled[1], spelled[2] or spelled[3]
        if mode == "bounded" and number is not None:
            return cls("bounded", int(number))
        if mode == "weak":
            return cls("weak", _DEFAULT_WINDOW if number is None else int(number))
        if mode == "strong" and number is None:
            return cls("strong", 0)
        if mode == "eventual" and number is None:
            return cls("eventual", None)
        raise _unknown(text)

    @property
    def synchronous(self) -> bool:
        """All workers' gradients of a clock become one update."""
        return self.mode in ("strong", "bounded") and self.bound == 0

    @property
    def largest_gap(self) -> int | None:
        """A read at clock c has all updates before clock c - largest_gap; None: not promised."""
        return self.bound if self.mode in ("strong", "bounded") else None

    @property
    def copy_clocks(self) -> int:
        """Return for how many clocks a worker goes on with parameters that it has read once."""
        return max(1, self.bound or 1) if self.mode == "weak" else 1

    def __str__(self) -> str:
        return f"{self.mode}:{self.bound}" if self.mode in ("bounded", "weak") else self.mode


def _unknown(text: str) -> UsageError:
    return UsageError(
        f'consistency "{text}" is not known: use "strong", "bounded:3" (a read misses at most 3 '
        'clocks), "eventual", or "weak:8" (a copy is used for up to 8 clocks)'
    )


# The precisions that operators are timed in, as the library names them.
#
# A mode is a precision: "" (torch's defaults: tf32 in cuDNN only), "fp32" (no tf32 anywhere),
# "tf32", or autocast to "bf16" or "fp16". It ends with "+benchmark" where cuDNN tries its
# algorithms.

PRECISIONS = ("tf32", "bf16", "fp16")  # those that a user may ask for
_TRIES = "+benchmark"


def mode_of(precision: str, *, benchmark: bool) -> str:
    return precision + (_TRIES if benchmark else "")


def precision_of(mode: str) -> str:
    return mode.removesuffix(_TRIES)


def tries_algorithms(mode: str) -> bool:
    """Whether the script had torch.backends.cudnn.benchmark on."""
    return mode.endswith(_TRIES)


def uses_autocast(mode: str) -> bool:
    return precision_of(mode) in ("bf16", "fp16")
