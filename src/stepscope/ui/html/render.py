"""Render a page as one file with nothing to fetch, ever: templates, scripts put together,
tables, and the classes and parts that have a colour.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from markupsafe import Markup, escape

from stepscope.records.explanation import GAP_CAUSES, Budget, RankExplanation
from stepscope.records.job import KINDS as COLLECTIVES
from stepscope.records.run import STALL_CAUSES
from stepscope.records.trace import DeviceKind, HostKind, Trace
from stepscope.text.figures import duration, long_duration, percent, rate, size
from stepscope.text.words import NAMES, finding_page, sentence
from stepscope.ui.words import PARTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

# What report, comparison and calibration share: one file with nothing to fetch, ever.


def render_page(
    template: str, *, styles: Sequence[str], scripts: Sequence[str] = (), **context: Any
) -> str:
    """A whole page; its style sheets and scripts are inlined."""
    script = bundle(*scripts) if scripts else ""
    return (
        _environment()
        .get_template(template)
        .render(
            style=Markup("".join(map(read_page_file, styles))),
            script=Markup(script),
            script_hash=_policy_hash(script),
            shared=shared_block(),
            **context,
        )
    )


def render_part(template: str, **context: Any) -> Markup:
    """A part of a page."""
    return Markup(_environment().get_template(template).render(**context))


def json_block(body: dict[str, Any]) -> str:
    """JSON for a script; no character that could end its element."""
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def write_atomically(path: Path, text: str) -> None:
    """The whole file or none: a reader never meets half of one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", errors="replace", newline="\n") as stream:
            stream.write(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@cache
def _environment() -> jinja2.Environment:
    return make_environment(read_page_file)


def make_environment(read_template: Callable[[str], str]) -> jinja2.Environment:
    """Templates that escape everything, with the filters for figures."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(read_template),
    )
    filters: dict[str, Any] = {
        "code": code_markup,
        "duration": duration,
        "finding_page": finding_page,
        "long_ms": lambda ms: long_duration(ms * 1e6),
        "ms": lambda ms: duration(ms * 1e6),
        "percent": percent,
        "rate": lambda gb_s: rate(gb_s * 1e9, "B/s"),
        "sentence": sentence,
        "size": size,
    }
    environment.filters |= filters
    return environment


def code_markup(text: str) -> Markup:
    """Text with what stands between its backticks as code."""
    parts = [escape(part) for part in text.split("`")]
    pieces = [Markup("<code>{}</code>").format(p) if i % 2 else p for i, p in enumerate(parts)]
    return Markup("").join(pieces)


def shared_block() -> Markup:
    """What shared.js reads."""
    body = {
        "classes": EVENT_CLASSES,
        "classWords": CLASS_WORDS,
        "causes": GAP_CAUSES,
        "causeLabels": gap_labels(),
        "collectives": COLLECTIVES,
        "stalls": STALL_CAUSES,
        "names": sorted(NAMES),
    }
    return Markup(json_block(body))


def _policy_hash(script: str) -> str:
    """Only our own script may run: a name that slipped past the escaping still could not."""
    digest = hashlib.sha256(script.encode()).digest()
    return base64.b64encode(digest).decode("ascii")


# The page's ES modules as one script, put together when a page is rendered: no tool is needed.
#
# A module becomes a function that returns its exports, after the modules that it imports. Comments
# and indentation are left out. Scripts may import and export in these ways only:
#
#     import { a, b as c } from "./x.js";
#     export function f() {}     export class C {}     export const K = 1;

_IMPORT = re.compile(r'^import (?:\{([^}]*)\} from )?"\./(\w+)\.js";$')
_EXPORT = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)")
_CAST = re.compile(r"/\*\* @(?:type|param) .*?\*/ ?")


@cache
def bundle(*entries: str) -> str:
    """Run these modules in this order, each after what it imports."""
    done: dict[str, str] = {}
    for entry in entries:
        _add(entry, done, ())
    return '(() => {\n"use strict";\n' + "".join(done.values()) + "})();\n"


def read_page_file(name: str) -> str:
    """A script, style or template."""
    return files("stepscope.ui.html").joinpath("page", name).read_text(encoding="utf-8")


def has_page_file(name: str) -> bool:
    return files("stepscope.ui.html").joinpath("page", name).is_file()


def _add(name: str, done: dict[str, str], above: tuple[str, ...]) -> None:
    if name in done:
        return
    if name in above:
        raise ValueError(f"scripts import each other in a circle: {' -> '.join((*above, name))}")
    body: list[str] = []
    exports: list[str] = []
    for line in _code_lines(read_page_file(f"{name}.js")):
        if imported := _IMPORT.match(line):
            names, module = imported.groups()
            _add(module, done, (*above, name))
            if names:
                body.append(f"const {{{names.replace(' as ', ': ')}}} = ${module};")
            continue
        if line.startswith(("import ", "export ")):
            exported = _EXPORT.match(line)
            if exported is None:
                raise ValueError(f"{name}.js: the bundler does not know {line!r}")
            exports.append(exported[1])
            line = line.removeprefix("export ")
        body.append(line)
    inside = "\n".join(body)
    done[name] = (
        f"const ${name} = (() => {{\n{inside}\nreturn {{ {', '.join(exports)} }};\n}})();\n"
    )


def _code_lines(source: str) -> list[str]:
    lines: list[str] = []
    comment = False
    for line in source.splitlines():
        code = line.strip()
        opens = code.startswith("/**") and "*/" not in code
        if comment or opens:
            comment = "*/" not in code
            continue
        code = _CAST.sub("", code)
        if not code or code.startswith("//") or (code.startswith("/**") and code.endswith("*/")):
            continue
        lines.append(code)
    return lines


# Classes of events, one colour each: shared by timeline, flame graphs and tables.

# class -> (what a tip calls an event of it, what the legend calls its colour)
_WORDS = {
    "compute": ("compute kernel", "Compute"),
    "comm": ("communication", "Communication"),
    "memory": ("copy or memset", "Copies"),
    "device_sync": ("device sync", ""),
    "device_annotation": ("device annotation", ""),
    "device_other": ("device", ""),
    "operator": ("operator", "Operator"),
    "annotation": ("annotation", "Annotation"),
    "python_call": ("Python function", "Python"),
    "runtime": ("runtime call", "Runtime call"),
    "overhead": ("profiler overhead", "Profiler work"),
    "host_other": ("host", ""),
    "thread": ("thread", ""),
}
EVENT_CLASSES = tuple(_WORDS)
CLASS_WORDS = {name: tip for name, (tip, _) in _WORDS.items()}
LEGEND = {name: label for name, (_, label) in _WORDS.items() if label}
RUNTIME = EVENT_CLASSES.index("runtime")
THREAD = EVENT_CLASSES.index("thread")

_HOST_CLASSES = {
    HostKind.OPERATOR: "operator",
    HostKind.ANNOTATION: "annotation",
    HostKind.PYTHON: "python_call",
    HostKind.RUNTIME: "runtime",
    HostKind.OVERHEAD: "overhead",
    HostKind.OTHER: "host_other",
}
_DEVICE_CLASSES = {
    DeviceKind.KERNEL: "compute",
    DeviceKind.MEMCPY: "memory",
    DeviceKind.MEMSET: "memory",
    DeviceKind.SYNC: "device_sync",
    DeviceKind.ANNOTATION: "device_annotation",
    DeviceKind.OTHER: "device_other",
}
WORK = (DeviceKind.KERNEL, DeviceKind.MEMCPY, DeviceKind.MEMSET)


def host_classes(trace: Trace, rank: RankExplanation) -> NDArray[np.uint8]:
    """Class of every host event; on a CPU-only trace communication keeps its colour."""
    classes = _lookup(_HOST_CLASSES)[trace.host.kind]
    if trace.kind != "cpu":
        return classes
    comm = _codes_of_kind(trace.host.name, trace.strings, rank, "comm")
    return np.where(np.isin(trace.host.name, comm), np.uint8(EVENT_CLASSES.index("comm")), classes)


def device_classes(trace: Trace, rank: RankExplanation) -> NDArray[np.uint8]:
    """Class of every device event; the explanation knows which kernels communicate."""
    classes = _lookup(_DEVICE_CLASSES)[trace.device.kind]
    work = is_work(trace.device.kind)
    for kind in ("compute", "comm", "memory"):
        codes = _codes_of_kind(trace.device.name, trace.strings, rank, kind)
        classes[work & np.isin(trace.device.name, codes)] = EVENT_CLASSES.index(kind)
    return classes


def is_work(kind: NDArray[np.int8]) -> NDArray[np.bool_]:
    """True for kernels, copies and memsets; the other device rows only describe."""
    return np.isin(kind, np.array(WORK, dtype=kind.dtype))


def _lookup(table: Mapping[HostKind, str] | Mapping[DeviceKind, str]) -> NDArray[np.uint8]:
    classes = [EVENT_CLASSES.index(name) for _, name in sorted(table.items())]
    return np.array(classes, dtype=np.uint8)


def _codes_of_kind(
    name: NDArray[np.int32], strings: tuple[str, ...], rank: RankExplanation, kind: str
) -> NDArray[np.int32]:
    wanted = {kernel.name for kernel in rank.kernels if kernel.kind == kind}
    codes = [code for code in np.unique(name).tolist() if code >= 0 and strings[code] in wanted]
    return np.array(codes, dtype=np.int32)


# The parts of a step as the page shows them: words of `ui.words`, colours of the style sheet.


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSlice:
    """One part of a step; `color` names a CSS variable."""

    label: str
    color: str
    idle: bool
    hint: str
    stall: bool = False
    ms: float = 0.0
    share: float = 0.0


_COLORS = {"exposed_comm": "comm", "exposed_memory": "memory"}


def slices(budget: Budget) -> list[BudgetSlice]:
    """The budget's parts that took any time."""
    return [slice_of(part.id, part.ms, part.share) for part in budget.parts if part.ms > 0]


def gap_labels() -> dict[str, str]:
    """Label of each idle cause, for the timeline's tooltips."""
    return {_key(name): label for name, (label, idle, _) in PARTS.items() if idle}


def slice_of(part_id: str, ms: float = 0.0, share: float = 0.0) -> BudgetSlice:
    """How one part looks, however long it took."""
    key = _key(part_id)
    label, idle, hint = PARTS[part_id]
    return BudgetSlice(
        label=label,
        color=_COLORS.get(key, key),
        idle=idle,
        hint=hint,
        stall=part_id.startswith("stall_"),
        ms=ms,
        share=max(share, 0.0),
    )


def _key(part_id: str) -> str:
    """Parts and causes of gaps share colours; only the part's id says that it is idle time."""
    return part_id.removeprefix("idle_")


# A table as the page takes it.


def make_table(
    title: str,
    columns: str,
    rows: Iterable[tuple[Any, ...]],
    *,
    sort: int,
    absent: str = "",
    events: bool = False,
) -> dict[str, Any]:
    """`columns`: "label:type | ...", with types that table_box.js knows.

    `sort` is a column, the largest first, or -1 for none. `events`: the first column names events
    that the timeline can search for.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    return {
        "id": title.lower().replace(",", "").replace(" ", "-"),
        "title": title,
        "columns": [column.split(":") for column in columns.split(" | ")],
        "rows": cells,
        "sort": sort,
        "absent": "" if cells else absent,
        "events": events,
    }


def _cell(value: Any) -> Any:
    """JSON has no word for infinity: a rate over no time is absent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
