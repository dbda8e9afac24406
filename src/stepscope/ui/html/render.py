"""What report, comparison and calibration share: one file with nothing to fetch, ever."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from functools import cache
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from stepscope.records.addresses import finding_page
from stepscope.records.explanation import GAP_CAUSES
from stepscope.records.figures import duration, long_duration, percent, rate, size
from stepscope.records.job import KINDS as COLLECTIVES
from stepscope.records.whole_run import STALL_CAUSES
from stepscope.records.words import NAMES, sentence
from stepscope.ui.html.bundle import bundle, read_page_file
from stepscope.ui.html.classes import CLASS_WORDS, EVENT_CLASSES
from stepscope.ui.html.parts import gap_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


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
