"""compiler.jsonl: what torch.compile did in this process, as torch itself keeps it.

Dynamo keeps its compilations and graph breaks in lists, and Inductor every compiled graph as text,
cached ones too. They are read, never changed: cache keys, graphs and numbers stay what they are.
Where a version of torch keeps less, less is written.
"""

from __future__ import annotations

import base64
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

from stepscope.measure.cuda_graphs import GraphCaptures, outside_torch
from stepscope.measure.folder import COMPILER
from stepscope.measure.never_raise import never_raise, note
from stepscope.measure.patches import when_imported, wrap
from stepscope.measure.writer import try_append

MOST_TEXT_BYTES = 8 << 20  # of one graph, packed; larger ones are named without their text
MOST_GRAPHS = 4096
_MOST_REASON, _MOST_FRAMES = 2000, 8
_LONGEST_WAIT_S = 1.0  # a forked process may have inherited a lock that nobody will release
# What is kept of dynamo's own record of a compilation; a version may lack some.
_FIELDS = (
    "compile_id", "co_name", "co_filename", "co_firstlineno", "is_forward", "start_time_us",
    "duration_us", "start_time", "entire_frame_compile_time_s",
    "backward_cumulative_compile_time_us", "recompile_reason", "fail_type", "fail_reason",
    "fail_user_frame_filename", "fail_user_frame_lineno", "has_guarded_code",
    "cudagraph_skip_reason", "inductor_fx_local_cache_hit_count",
    "inductor_fx_local_cache_miss_count", "aotautograd_local_cache_hit_count",
    "aotautograd_local_cache_miss_count",
)  # fmt: skip


class CompilerLog:
    """Collects until there is a rank folder to write to."""

    def __init__(self) -> None:
        self._lines: list[dict[str, Any]] = []
        self._graphs = 0
        self._last_compilation: Any = None
        self._callers: dict[str, list[Any]] = {}  # by compilation: the line that made it compile
        self._breaks_seen = 0
        self._looking = threading.Lock()
        self._captures_graphs = True
        self._captures = GraphCaptures()

    def attach(self) -> None:
        self._captures.attach()
        when_imported("torch._inductor.output_code", self._watch_graphs)

    @never_raise
    def begins(self, compile_id: str | None) -> None:
        """In the thread that compiles: who called what is compiled now. Dynamo may compile a
        function of torch's own around it, which says nothing to the user."""
        if compile_id is None:
            return
        frame, _ = outside_torch(sys._getframe(1))
        if frame is not None:
            code = frame.f_code
            caller = [code.co_filename, frame.f_lineno, code.co_qualname]
            self._callers.setdefault(compile_id, caller)

    def look(self, compile_id: str | None = None) -> None:
        """Take what dynamo has recorded since the last look; `compile_id` has just ended."""
        if not self._looking.acquire(timeout=_LONGEST_WAIT_S):
            return
        try:
            self._look_at_breaks(compile_id or _compile_id())
            self._look_at_compilations()
        finally:
            self._looking.release()

    @never_raise
    def write(self, folder: Path) -> None:
        """Append what is new. In the writer's thread: packing takes no time from the training."""
        self._captures.write(folder)
        with self._looking:  # breaks belong to the compilation that ends next: not yet
            self._look_at_compilations()
        lines = self._lines[:]
        del self._lines[: len(lines)]
        if lines:
            try_append(folder / COMPILER, map(_packed, lines))

    @never_raise
    def _look_at_compilations(self) -> None:
        # A module that another thread still imports has no such function yet: nothing is compiled.
        utils = sys.modules.get("torch._dynamo.utils")
        metrics = getattr(utils, "get_compilation_metrics", None)
        if metrics is None:
            return
        recorded = list(metrics())
        seen = [number for number, one in enumerate(recorded) if one is self._last_compilation]
        for one in recorded[seen[-1] + 1 if seen else 0 :]:
            fields = {name: _plain(getattr(one, name, None)) for name in _FIELDS}
            known = {name: value for name, value in fields.items() if value is not None}
            if (caller := self._callers.get(str(known.get("compile_id")))) is not None:
                known["caller"] = caller
            self._lines.append({"what": "compilation", **known})
        self._last_compilation = recorded[-1] if recorded else None

    @never_raise
    def _look_at_breaks(self, compile_id: str | None) -> None:
        utils = sys.modules.get("torch._dynamo.utils")
        reasons: list[Any] = getattr(utils, "graph_break_reasons", [])
        if len(reasons) < self._breaks_seen:  # torch._dynamo.reset() empties the list
            self._breaks_seen = 0
        new = reasons[self._breaks_seen :]
        self._breaks_seen += len(new)
        for one in new:
            stack = list(one.user_stack)[-_MOST_FRAMES:]
            frames = [[frame.filename, frame.lineno or 0, frame.name] for frame in stack]
            reason = _plain(one.reason)
            self._lines.append(
                {"what": "break", "compile_id": compile_id, "reason": reason, "frames": frames}
            )

    def _watch_graphs(self, module: Any) -> None:
        """Every graph passes here once, whether it was compiled or came from a cache."""
        graph_type = getattr(module, "CompiledFxGraph", None)
        original = getattr(graph_type, "post_compile", None)
        if graph_type is None or original is None:
            note("compiler", "this version of torch does not show its compiled graphs")
            return

        def post_compile(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(graph, *args, **kwargs)
            finally:
                self._add_graph(graph)

        wrap(graph_type, "post_compile", post_compile)

    @never_raise
    def _add_graph(self, graph: Any) -> None:
        self._graphs += 1
        if self._graphs > MOST_GRAPHS or not self._captures_graphs:
            return
        options = getattr(graph, "fx_kwargs", None) or {}
        # None also when nobody asked for CUDA graphs.
        reason = getattr(graph, "disabled_cudagraphs_reason", None)
        info = getattr(graph, "cudagraph_info", None)
        more = getattr(info, "cudagraph_fail_reasons", None) or ()
        self._lines.append(
            {
                "what": "graph",
                "key": getattr(graph, "_fx_graph_cache_key", None),
                "compile_id": _compile_id(),
                "backward": options.get("is_backward"),
                "devices": sorted(map(str, getattr(graph, "device_types", ()))),
                "not_graphed": (
                    "; ".join(map(str, (reason,) if reason else more))[:_MOST_REASON] or None
                ),
                "operators": getattr(graph, "inductor_post_grad_graph_str", None),
                "code": getattr(graph, "source_code", None),
            }
        )

    def of_rank(self, *, traced: bool) -> CompilerLog:
        """Without a trace nothing could be joined to the graphs: they are left out."""
        if not traced:
            self._captures_graphs = self._captures.is_wanted = False
            self._lines = [line for line in self._lines if line["what"] != "graph"]
        return self


@never_raise
def _compile_id() -> str | None:
    guards: Any = sys.modules.get("torch._guards")
    current = guards.CompileContext.current_compile_id() if guards is not None else None
    return None if current is None else str(current)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_MOST_REASON]
    return value if isinstance(value, bool | int | float) else None


def _packed(line: dict[str, Any]) -> dict[str, Any]:
    """Texts of a graph, compressed."""
    packed = dict(line)
    if line["what"] == "graph":
        for name in ("operators", "code"):
            packed[name] = _pack(line[name])
    return packed


def _pack(text: str | None) -> str | None:
    if not text:
        return None
    data = zlib.compress(text.encode("utf-8", "replace"), 6)
    return base64.b64encode(data).decode() if len(data) <= MOST_TEXT_BYTES else None
