"""stepscope doctor: check what works on this machine."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata

from stepscope.text.figures import size
from stepscope.ui.cli.options import json_option, verb


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    detail: str
    todo: str = ""


@verb(
    "doctor",
    examples=(
        ("stepscope doctor", "Check Python, torch, the GPU, the cache and other things"),
        ("stepscope doctor --json", "The same, for a program"),
    ),
)
@json_option
def command(as_json: bool) -> None:
    """Check what works on this machine, and show what to do about what is missing."""
    checks = [check() for check in _CHECKS]
    if as_json:
        from stepscope.ui.json_text import write_json

        write_json({"schema": 1, "checks": [asdict(check) for check in checks]})
        return
    _show(checks)


def _show(checks: list[Check]) -> None:
    from rich.table import Table
    from rich.text import Text

    from stepscope.ui.terminal.console import make_console

    missing = [check for check in checks if not check.ok]
    console = make_console()
    verdict = f"{len(checks) - len(missing)} of {len(checks)} checks pass here"
    console.print(Text(verdict, "bold") if missing else Text("everything works here", "bold green"))
    grid = Table.grid(padding=(0, 2))
    for check in checks:
        mark = Text("✓", "green") if check.ok else Text("–", "yellow")
        grid.add_row(mark, check.name, check.detail)
        if check.todo:
            grid.add_row("", "", Text(check.todo, "bright_black"))
    console.print(grid)


def _python() -> Check:
    return Check("python", True, f"{platform.python_version()} on {platform.machine()}")


def _reading() -> Check:
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("numpy", "msgspec", "isal", "zstandard")
    )
    return Check("reading traces", True, f"JSON, gzip, zstd ({versions})")


def _nsight() -> Check:
    import sqlite3

    return Check("Nsight exports", True, f"SQLite {sqlite3.sqlite_version} (nsys export)")


def _cache() -> Check:
    from stepscope.trace.cache import Cache

    cache = Cache.default()
    folder = existing = cache.folder
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        why = f"{folder} cannot be written: every command reads the whole trace again"
        return Check("cache", False, why, "set STEPSCOPE_CACHE_DIR to a folder you can write")
    return Check("cache", True, f"{folder} ({size(cache.used_bytes())} used)")


def _torch() -> Check:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        todo = "pip install torch, in the environment you train in"
        return Check("torch", False, "not installed: explain works, demo does not", todo)
    return Check("torch", True, version)


def _accelerator() -> Check:
    try:
        import torch
    except Exception as error:
        return Check("accelerator", False, f"torch did not import: {error}")
    if not torch.cuda.is_available():
        why = "none that torch can use; traces from other machines can still be explained"
        return Check("accelerator", False, why)
    count = torch.cuda.device_count()
    return Check("accelerator", True, f"{count} x {torch.cuda.get_device_name(0)}")


def _distributed() -> Check:
    try:
        import torch.distributed as dist
    except Exception as error:
        return Check("several processes", False, f"torch did not import: {error}")
    if not dist.is_available():
        return Check("several processes", False, "this torch was built without distributed")
    offered = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    backends = [name for name, available in offered.items() if available]
    return Check("several processes", bool(backends), ", ".join(backends) or "none")


_CHECKS = (_python, _reading, _nsight, _cache, _torch, _accelerator, _distributed)
