"""Results by model in one JSON file, written anew after each of them: a cut run loses one."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from library_models import MODELS

if TYPE_CHECKING:
    from collections.abc import Iterable


def read(path: Path) -> dict[str, Any]:
    """Results by the model's name; none when there is no such file."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return {name: result for name, result in content.items() if name in MODELS}


def merged(paths: Iterable[Path]) -> dict[str, Any]:
    """Later files win, except that a failure or a part never replaces a whole result."""
    results: dict[str, Any] = {}
    for path in paths:
        for name, result in read(path).items():
            if name not in results or _is_whole(result) or not _is_whole(results[name]):
                results[name] = result
    return results


def _is_whole(result: dict[str, Any]) -> bool:
    return result.get("failure") is None and result.get("finished", True)


def save(path: Path, name: str, result: dict[str, Any]) -> None:
    """Several processes may save at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(read(path) | {name: result}, indent=1))
        new.replace(path)


def chosen(models: str) -> tuple[str, ...]:
    """`models` as the user gave them, "llama,swin"; empty means all."""
    names = tuple(models.split(",")) if models else MODELS
    if unknown := [name for name in names if name not in MODELS]:
        raise SystemExit(f"no such model: {', '.join(unknown)}. There are: {', '.join(MODELS)}")
    return names


def script(name: str) -> Path:
    return Path(__file__).parent / "library_models" / f"{name}.py"
