"""Events by hand, as Kineto writes them."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]


def op(name: str, ts: Any, dur: Any, *, tid: Any = 1, **args: Any) -> Event:
    return _span("cpu_op", name, ts, dur, 1, tid, args)


def call(name: str, ts: Any, dur: Any, correlation: Any, *, tid: Any = 1, **args: Any) -> Event:
    return _span("cuda_runtime", name, ts, dur, 1, tid, {"correlation": correlation, **args})


def kernel(name: str, ts: Any, dur: Any, correlation: Any = None, **args: Any) -> Event:
    known = {} if correlation is None else {"correlation": correlation}
    return _span("kernel", name, ts, dur, 0, 7, {"device": 0, "stream": 7, **known, **args})


def span(category: str, name: str, ts: Any, dur: Any, **args: Any) -> Event:
    return _span(category, name, ts, dur, args.pop("pid", 1), args.pop("tid", 1), args)


def flow(phase: str, category: str, id: Any, ts: Any, *, pid: Any = 1, tid: Any = 1) -> Event:  # noqa: A002
    end = {"bp": "e"} if phase == "f" else {}
    return {
        "ph": phase,
        "cat": category,
        "name": category,
        "id": id,
        "pid": pid,
        "tid": tid,
        "ts": ts,
        **end,
    }


def memory(ts: Any, size: int, **args: Any) -> Event:
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "s": "t",
        "name": "[memory]",
        "pid": 1,
        "tid": 1,
        "ts": ts,
        "args": {"Bytes": size, "Addr": 4096, "Device Type": 1, "Device Id": 0, **args},
    }


def thread_name(pid: Any, tid: Any, name: str) -> Event:
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def ops(count: int) -> list[Event]:
    """A plain run of operators, one after another."""
    return [op(f"aten::op{i % 7}", i * 10, 5, **{"External id": i + 1}) for i in range(count)]


def _span(
    category: str, name: str, ts: Any, dur: Any, pid: Any, tid: Any, args: dict[str, Any]
) -> Event:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args,
    }
