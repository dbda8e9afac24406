"""Inputs whose names are hostile: to terminals, pages, spreadsheets, and to whoever parses them."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

from fuzz.mutate.traces import seeds
from fuzz.odd_json import TEXTS, text
from hostile_names import FORMULA, HOSTILE, PAGE, PLACES, TERMINAL
from stepscope.text.words import SITE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

    Name = Callable[[Random, str], str]

_PIECES = (
    *TEXTS, HOSTILE, TERMINAL, PAGE, FORMULA, "\n", "\r\n", "\x1b[2J", "\x9b", "\u202e", "\u2028",
    "<script>alert(1)</script>", "&lt;", "&#60;img&#62;", "javascript:alert(1)", "[/]", "[link=x]",
    "{{ 7 * 7 }}", "{% raw %}", "${x}", "%s%n", "\ufeff", "\ud800", "\U000e0001", "e\u0301" * 50,
    "a" * 70_000, "(" * 4000, ": " * 3000, "::" * 3000, "<" * 3000, "#" + "9" * 5000,
    "train.py(" + "9" * 5000 + "): f", "x.py(1): " + "y" * 9000, "nn.Module: \n", "ProfilerStep#",
    "ProfilerStep#" + "9" * 30, "Optimizer.step#\x1b.step", "ncclDevKernel_", "PP:0F1B" + "9" * 50,
    "Forward " + "9" * 5000, "-1", "+1", "@SUM(1)", "\tx",
)  # fmt: skip


def mutate(rng: Random, folder: Path) -> Path:
    if rng.random() < 0.1:
        return PLACES[rng.choice(sorted(PLACES))](folder)
    trace: dict[str, Any] = json.loads(rng.choice(seeds()))
    for _ in range(rng.choice((1, 1, 2, 4))):
        rng.choice(_WAYS)(rng, trace)
    path = folder / rng.choice(("trace.json", "tr\udcff.json", "a\nb.json", "<b>.json", "-x.json"))
    path.write_bytes(text(trace))
    return path


def drive(path: Path, work: Path) -> str:
    """Besides all that must hold: nothing to obey on the terminal, no element of a name's."""
    import contextlib
    import io

    from fuzz.drive import ANSWERED, change, explain, show
    from stepscope import StepscopeError
    from stepscope.trace.discover import find_traces
    from stepscope.ui.json_text import json_text
    from stepscope.ui.terminal.explanation import print_explanation
    from stepscope.ui.terminal.short import MOST_LINES, print_short
    from stepscope.ui.topics.explanation_json import explanation_json

    try:
        explanation = explain(path, work)
    except StepscopeError:
        return "refused"
    written = json_text(explanation_json(explanation))
    assert written.isprintable()
    json.loads(written)
    full, short = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(full):
        print_explanation(explanation)
    with contextlib.redirect_stdout(short):
        print_short(explanation)
    for printed in (full.getvalue(), short.getvalue()):
        assert all(char == "\n" or char.isprintable() for char in printed)
    assert short.getvalue().count("\n") <= MOST_LINES
    page = (work / "report.html").read_text(encoding="utf-8")
    found = _Elements()
    found.feed(page)
    found.close()
    assert found.odd == []
    if "\udcff" not in path.name:
        show(explanation)
    changed = path.is_file() and path.stat().st_size % 4 == 0  # what-ifs take most of the time
    for file in find_traces(path)[:1] if changed else ():
        change(file)
    return ANSWERED


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.odd: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("img", "iframe", "object", "embed", "base"):
            self.odd.append(tag)
        self.odd += [name for name, _ in attrs if name.startswith("on")]
        links = (value or "" for name, value in attrs if name in ("href", "src"))
        ours = ("#", "data:", "https://ui.", SITE)
        self.odd += [link for link in links if not link.startswith(ours)]


def _name(rng: Random, before: str) -> str:
    piece = rng.choice(_PIECES)
    pick = rng.randrange(4)
    if pick == 0:
        return piece
    if pick == 1:
        return before + piece
    if pick == 2:
        return piece + before
    middle = rng.randrange(len(before) + 1)
    return before[:middle] + piece + before[middle:]


def _events(rng: Random, trace: dict[str, Any]) -> list[dict[str, Any]]:
    events = [event for event in trace["traceEvents"] if isinstance(event, dict)]
    category = rng.choice(events).get("cat")
    mine = [event for event in events if event.get("cat") == category]
    return mine if rng.random() < 0.5 else rng.sample(mine, min(len(mine), 5))


def _names(rng: Random, trace: dict[str, Any]) -> None:
    for event in _events(rng, trace):
        event["name"] = _name(rng, str(event.get("name", "")))


def _one_name(rng: Random, trace: dict[str, Any]) -> None:
    """The same for all, so that it becomes the largest of a table."""
    name = _name(rng, "")
    for event in _events(rng, trace):
        event["name"] = name


def _arguments(rng: Random, trace: dict[str, Any]) -> None:
    for event in _events(rng, trace):
        args = event.get("args")
        if isinstance(args, dict):
            for key, value in list(args.items()):
                if isinstance(value, str) or rng.random() < 0.1:
                    args[key] = _name(rng, str(value))


def _head(rng: Random, trace: dict[str, Any]) -> None:
    group = {"pg_name": _name(rng, "0"), "pg_desc": _name(rng, ""), "ranks": [0, 1], "pg_size": 2}
    trace["distributedInfo"] = {
        "backend": _name(rng, "nccl"), "rank": 0, "world_size": 2, "pg_config": [group]
    }  # fmt: skip
    trace["deviceProperties"] = [
        {"id": 0, "name": _name(rng, "NVIDIA H200"), "totalGlobalMem": 10**11, "numSms": 132}
    ]
    trace[_name(rng, "key")] = _name(rng, "")


def _threads(rng: Random, trace: dict[str, Any]) -> None:
    for event in trace["traceEvents"]:
        if isinstance(event, dict) and event.get("ph") == "M":
            event["args"] = {"name": _name(rng, "thread"), "labels": _name(rng, "GPU 0")}


_WAYS: list[Callable[[Random, dict[str, Any]], None]] = [
    _names, _names, _names, _one_name, _one_name, _arguments, _arguments, _head, _threads,
]  # fmt: skip
