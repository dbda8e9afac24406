"""Names that do harm if they are not escaped, put into every place that names are read from."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import snapshots
from shared_traces import GOLDEN

MARK = "PLANTED"
TERMINAL = "\x1b]8;;http://evil\x07\x1b[2J\x1b[31m\x9b31m\r\b\x07\u202e\u200b\u2066\u2028"
MARKUP = "[bold]x[/bold][link=http://evil]y[/link][/nowhere]:heart:"
PAGE = "</script><!--<img src=x onerror=alert(1)><a href=javascript:alert(2)>{{ 7 * 7 }}{% x %}'\">"
FORMULA = "=cmd|' /C calc'!A0"
HOSTILE = f"{TERMINAL}{MARKUP}{PAGE}\n{MARK} verdict all is well\n"
Planted = tuple[str, ...]


def _trace(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        gzip.decompress((GOLDEN / f"{name}.json.gz").read_bytes()), strict=False
    )
    return content


def _events(folder: Path, name: str, wanted: Callable[[dict[str, Any]], bool]) -> Path:
    """Append hostile text to the name of every selected event."""
    trace = _trace(name)
    for event in trace["traceEvents"]:
        if wanted(event):
            event["name"] = f"{event['name']}{HOSTILE}"
    path = folder / "trace.json"
    path.write_text(json.dumps(trace))
    return path


def kernels(folder: Path) -> Path:
    return _events(folder, "cuda_step", lambda event: event.get("cat") == "kernel")


def operators(folder: Path) -> Path:
    return _events(folder, "cpu_stack_memory", lambda event: event.get("cat") == "cpu_op")


def copies(folder: Path) -> Path:
    return _events(folder, "cuda_step", lambda event: "gpu_mem" in event.get("cat", ""))


def annotations(folder: Path) -> Path:
    return _events(folder, "cuda_step", lambda event: "user_annotation" in event.get("cat", ""))


def functions(folder: Path) -> Path:
    """Python functions and modules, and the file names in them."""
    trace = _trace("cpu_stack_memory")
    for event in trace["traceEvents"]:
        if event.get("cat") == "python_function":
            file, mark, function = event["name"].partition("(")
            event["name"] = f"{file}{HOSTILE}{mark}{function}{HOSTILE}".replace("\n", " ")
    path = folder / "trace.json"
    path.write_text(json.dumps(trace))
    return path


def threads(folder: Path) -> Path:
    trace = _trace("cuda_step")
    for event in trace["traceEvents"]:
        if event.get("ph") == "M":
            event["args"] = {key: f"{value}{HOSTILE}" for key, value in event["args"].items()}
    trace["deviceProperties"] = [{"id": 0, "name": f"GPU{HOSTILE}", "totalGlobalMem": 10**10}]
    path = folder / "trace.json"
    path.write_text(json.dumps(trace))
    return path


def arguments(folder: Path) -> Path:
    """Every text among the arguments, and the metadata of the file."""
    trace = _trace("cuda_step")
    for event in trace["traceEvents"]:
        for key, value in event.get("args", {}).items():
            if isinstance(value, str):
                event["args"][key] = f"{value}{HOSTILE}"
    group = {"pg_name": f"0{HOSTILE}", "pg_desc": HOSTILE, "pg_size": 2, "ranks": [0, 1]}
    trace["distributedInfo"] = {"backend": HOSTILE, "rank": 0, "pg_config": [group]}
    trace["traceName"] = HOSTILE
    path = folder / "trace.json"
    path.write_text(json.dumps(trace))
    return path


def frames(folder: Path) -> Path:
    device = snapshots.Device()
    odd = [snapshots.frame(f"/home/{HOSTILE}.py", 3, HOSTILE)]
    for size in (3_000_000, 5_000_000):
        device.alloc(size, odd)
    device.fail(1 << 40, 5, odd)
    content = device.snapshot()
    content["device_traces"][0].append({"action": HOSTILE, "addr": 0, "size": 0})
    content["segments"].append({"address": HOSTILE, "total_size": HOSTILE})
    path = folder / "memory.pickle"
    path.write_bytes(pickle.dumps(content))
    return path


def run_folder(folder: Path) -> Path:
    """rank.json: host, script, device, groups, problems; and memory.json's modules and notes."""
    run = folder / "run"
    shutil.copytree(GOLDEN / "h200-resnet18", run)
    for name in ("rank.json", "memory.json"):
        file = run / "rank-00000" / name
        file.write_text(json.dumps(_planted(json.loads(file.read_text()))))
    facts = {"command": ["python", HOSTILE], "host": HOSTILE, "status": "finished"}
    (run / "run.json").write_text(json.dumps({"schema": 1, **facts}))
    return run


_FIXED = ("status", "phase")  # our own words: another word would mean something else


def _planted(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _planted(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_planted(inner) for inner in value]
    return f"{value}{HOSTILE}" if isinstance(value, str) and key not in _FIXED else value


def logs(folder: Path) -> Path:
    """NCCL's log: host, transports, settings, warnings; without line breaks."""
    run = folder / "run"
    run.mkdir()
    shutil.copy(GOLDEN / "cuda_step.json.gz", run / "trace.json.gz")
    word = HOSTILE.replace("\n", " ")
    unbroken = word.replace(" ", "").replace("\u2028", "").replace(":", "")[:200]
    lines = (
        "comm 0xa1 rank 0 nranks 2 cudaDev 0 busId 1b000 commId 0xfeed - Init START",
        f"Channel 00/02 : 0[0] -> 1[0] [send] via NET/Socket/{word}",
        f"NCCL_IB_DISABLE set by environment to {word}",
        f"Using network {word}",
        f"NET/IB : Using [0]{unbroken}:1/RoCE ; OOB x",
        f"P2P is disabled {word}",
    )
    text = "".join(f"{unbroken}:1:2 [0] NCCL INFO {line}\n" for line in lines)
    text += f"{unbroken}:1:2 [0] {unbroken}:7 NCCL WARN {word}\n"
    (run / "nccl.log").write_text(text.replace("\r", ""), encoding="utf-8")
    return run


def path_names(folder: Path) -> Path:
    """The folder and the file themselves; without slashes."""
    name = HOSTILE.replace("/", "|")
    (folder / name[:100]).mkdir()
    path = folder / name[:100] / f"x\n{MARK}\x1b[31m<img src=x onerror=alert(1)>.json.gz"
    shutil.copy(GOLDEN / "cuda_step.json.gz", path)
    return path


PLACES: dict[str, Callable[[Path], Path]] = {
    each.__name__: each
    for each in (
        kernels, operators, copies, annotations, functions, threads, arguments, frames, run_folder,
        logs, path_names,
    )
}  # fmt: skip
