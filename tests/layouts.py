"""Traces written in every layout and compression that files come in."""

from __future__ import annotations

import gzip
import json
from typing import Any

import zstandard

Events = list[Any]  # dicts, or text that is written unchanged

COMPRESSIONS = ("plain", "gzip", "gzip-members", "zstd", "zstd-frames")
HEAD = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 1, "numSms": 132}],
    "distributedInfo": {"rank": 3, "world_size": 8, "backend": "nccl"},
    "displayTimeUnit": "ms",
}
TAIL = {"traceName": "trace.json"}


def kineto(events: Events, head: dict[str, Any], tail: dict[str, Any]) -> str:
    """As Kineto's output_json.cpp writes: one event over several lines, indented by two spaces."""
    keys = "".join(f"\n  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items())
    rows = ",".join("\n  " + _kineto_event(event) for event in events)
    end = "".join(f",\n  {json.dumps(key)}: {json.dumps(value)}" for key, value in tail.items())
    return f'{{{keys}\n  "traceEvents": [{rows}\n  ]{end}\n}}'


def minified(events: Events, head: dict[str, Any], tail: dict[str, Any]) -> str:
    return _dumped(events, head, tail, separators=(",", ":"))


def dumped(events: Events, head: dict[str, Any], tail: dict[str, Any]) -> str:
    return _dumped(events, head, tail)


def indented(events: Events, head: dict[str, Any], tail: dict[str, Any]) -> str:
    return _dumped(events, head, tail, indent=2)


def windows(events: Events, head: dict[str, Any], tail: dict[str, Any]) -> str:
    return _dumped(events, head, tail, indent=1).replace("\n", "\r\n")


def events_first(events: Events, head: dict[str, Any], tail: dict[str, Any]) -> str:
    return _dumped(events, {}, {**head, **tail})


def events_last(events: Events, head: dict[str, Any], tail: dict[str, Any]) -> str:
    return _dumped(events, {**head, **tail}, {})


def bare_list(events: Events, head: dict[str, Any], tail: dict[str, Any]) -> str:
    return _list(events)


def bare_list_indented(events: Events, head: dict[str, Any], tail: dict[str, Any]) -> str:
    return _list(events, indent=1)


LAYOUTS = {
    write.__name__: write
    for write in (
        kineto,
        minified,
        dumped,
        indented,
        windows,
        events_first,
        events_last,
        bare_list,
        bare_list_indented,
    )
}


def text_of(
    events: Events | bytes,
    layout: str = "kineto",
    *,
    head: dict[str, Any] | None = None,
    tail: dict[str, Any] | None = None,
    bom: bool = False,
) -> bytes:
    """The text of a trace file before compression; events given as bytes are the whole text."""
    if isinstance(events, bytes):
        return events
    text = LAYOUTS[layout](events, HEAD if head is None else head, TAIL if tail is None else tail)
    return (b"\xef\xbb\xbf" if bom else b"") + text.encode("utf-8", "surrogateescape")


def packed(data: bytes, compression: str) -> bytes:
    half = len(data) // 2
    if compression == "gzip":
        return gzip.compress(data, 6, mtime=0)
    if compression == "gzip-members":
        return gzip.compress(data[:half], mtime=0) + gzip.compress(data[half:], mtime=0)
    if compression == "zstd":
        return zstandard.compress(data)
    if compression == "zstd-frames":
        return zstandard.compress(data[:half]) + zstandard.compress(data[half:])
    return data


def _dumped(events: Events, head: dict[str, Any], tail: dict[str, Any], **style: Any) -> str:
    hole = "\N{SNOWMAN}events\N{SNOWMAN}"
    text = json.dumps({**head, "traceEvents": hole, **tail}, **style)
    return text.replace(json.dumps(hole), _list(events, **style))


def _list(events: Events, **style: Any) -> str:
    rows = [e if isinstance(e, str) else json.dumps(e, **style) for e in events]
    comma, _ = style.get("separators", (", ", ""))
    if "indent" in style:
        return "[\n" + ",\n".join(rows) + "\n]"
    return "[" + comma.join(rows) + "]"


def _kineto_event(event: Any) -> str:
    if isinstance(event, str):
        return event
    lines = [
        ", ".join(f'"{key}": {json.dumps(event[key])}' for key in keys if key in event)
        for keys in (
            [key for key in event if key not in ("ts", "dur", "args")],
            ("ts", "dur"),
        )
    ]
    if "args" in event:
        args = event["args"]
        if not isinstance(args, dict):
            return json.dumps(event)
        args = ",".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in args.items())
        lines.append(f'"args": {{\n      {args}\n    }}')
    return "{\n    " + ",\n    ".join(filter(None, lines)) + "\n  }"
