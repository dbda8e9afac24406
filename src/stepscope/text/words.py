"""Words on every surface: plurals and capitals, what a step's parts are called and their
colours, addresses of pages, and patterns for text that are compiled when first used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, AnyStr, NamedTuple, cast

# Two rules of English for every sentence: plurals, and a capital for its first word.
#
# Names of code keep their spelling: `aten::mm` never becomes `Aten::mm`.

_FIRST_WORD = re.compile(r"([a-z]+)(?:'s)?(?=[ ,;]|: |\. )")
# Lower case wherever they stand, also at the beginning of a sentence.
NAMES = frozenset(
    {"aten", "cublas", "cudnn", "gloo", "mpi", "nccl", "rccl", "stepscope", "torch", "torchrun"}
    | {"void"}  # how a kernel's name may begin
)


def counted(number: float, one: str, many: str | None = None) -> str:
    """1 step, 2 steps, 1,024 ranks; `many` is the plural where it is not `one` with an s."""
    words = plural(number, one, many)
    return f"{number:g} {words}" if isinstance(number, float) else f"{number:,} {words}"


def ordinal(number: int) -> str:
    """2nd, 4th, 11th, 101st."""
    last = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{'th' if number % 100 in (11, 12, 13) else last}"


def plural(number: float, one: str, many: str | None = None) -> str:
    """The noun alone, where its number stands elsewhere: 1 of 3 kernels."""
    return one if number == 1 else many or f"{one}s"


def sentence(text: str) -> str:
    """A capital for a first word that is plain English; names of code keep their spelling."""
    first = _FIRST_WORD.match(text)
    if first is None or first[1] in NAMES:
        return text
    return text[0].upper() + text[1:]


def number_spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """0, 1, 2, 7 -> (0, 2), (7, 7)."""
    spans: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans


def number_ranges(numbers: Iterable[int]) -> list[str]:
    """8-11, 14: runs of consecutive numbers, in order."""
    return [str(a) if a == b else f"{a}-{b}" for a, b in number_spans(numbers)]


def short_ranges(numbers: Iterable[int], most: int = 6) -> str:
    ranges = number_ranges(numbers)
    return ", ".join(ranges[:most]) + (", …" if len(ranges) > most else "")


def named_ranks(ranks: Sequence[int]) -> str:
    """rank 3, or ranks 8-15."""
    return f"{plural(len(ranks), 'rank')} {short_ranges(ranks)}"


# The parts of a step: what each is called, and its colour on every surface.
#
# report.css has the same colours, and others for dark pages; a test holds the two together.


class StepPart(NamedTuple):
    label: str
    colour: str  # on a light page
    ansi: str  # the nearest colour that a terminal has a name for


# id of a part -> how it looks
STEP_PARTS = {
    "compute": StepPart("Compute", "#3f73c9", "blue"),
    "exposed_comm": StepPart("Exposed comm", "#e8742c", "dark_orange"),
    "exposed_memory": StepPart("Exposed copies", "#0d9488", "cyan"),
    "data_loading": StepPart("Data loading", "#c2417c", "magenta"),
    "sync": StepPart("Blocking sync", "#8c2f5f", "deep_pink4"),
    "operators": StepPart("Operator calls", "#d9c36a", "yellow"),
    "python": StepPart("Python", "#a09a2e", "yellow4"),
    "profiler": StepPart("Profiler", "#9aa3af", "bright_black"),
    "idle_launch": StepPart("Launch latency", "#7cc4e4", "sky_blue2"),
    "idle_other": StepPart("Other idle", "#c5cad2", "white"),
    "stall_data": StepPart("Data stalls", "#c2417c", "magenta"),
    "stall_evaluation": StepPart("Evaluation", "#7a5cc9", "medium_purple"),
    "stall_checkpoint": StepPart("Checkpoints", "#b58900", "dark_goldenrod"),
    "stall_gc": StepPart("GC pauses", "#4c9a5b", "green"),
    "stall_compile": StepPart("Compilation", "#0b98b0", "dark_cyan"),
    "stall_allocator": StepPart("Alloc retries", "#a0522d", "orange4"),
    "stall_collective": StepPart("Rank waits", "#e8742c", "dark_orange"),
    "stall_operating_system": StepPart("System stalls", "#4b5563", "bright_black"),
    "stall_logging": StepPart("Logging", "#8f8a26", "yellow4"),
    "stall_unknown": StepPart("Other stalls", "#8a93a0", "white"),
    "stall_collecting": StepPart("Collecting", "#7a5cc9", "medium_purple"),
    "stall_generating": StepPart("Generating", "#7a5cc9", "medium_purple"),
    "stall_without_gradients": StepPart("No gradients", "#7a5cc9", "medium_purple"),
}


# Addresses of the project's pages. Nothing is ever fetched from them: they are links to click.

SITE = "https://stepscope.github.io/stepscope"


def finding_page(finding: str) -> str:
    """Return the page about a finding, by its id."""
    return f"{SITE}/findings/{finding}/"


# Regular expressions that are compiled when they are first used.
#
# A run uses half of the product's patterns; compiling the others takes longer than many a step of
# an explanation.

_METHODS = ("search", "match", "fullmatch", "finditer", "findall", "split", "sub", "pattern")


class _LazyPattern:
    def __init__(self, pattern: str | bytes, flags: int) -> None:
        self._pattern, self._flags = pattern, flags

    def __getattr__(self, name: str) -> Any:
        """Called once: then the compiled pattern's methods are this object's own."""
        compiled: re.Pattern[Any] = re.compile(self._pattern, self._flags)
        self.__dict__.update({method: getattr(compiled, method) for method in _METHODS})
        return getattr(compiled, name)


def lazy_pattern(pattern: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Do as re.compile. An error in the pattern shows only when it is used."""
    return cast("re.Pattern[AnyStr]", _LazyPattern(pattern, flags))
