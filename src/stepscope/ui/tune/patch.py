"""The patch that does what the kept remedies did: a unified diff of the user's own files.

`patch -p1` or `git apply` takes it in the root of the user's git work tree, or in the folder that
the command ran in. Only `apply_patch` changes files, and only where git can bring them back.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.fix.patched_source import patch_source
from stepscope.records.script_facts import ScriptFacts
from stepscope.trace.files import read_whole

if TYPE_CHECKING:
    from stepscope.fix.named_changes import ChosenChange

_LIBRARIES = {"site-packages", "dist-packages"}
_NOT_IN_HEADERS = re.compile(r'[\x00-\x1f\x7f"\\]')  # no patch program reads such names alike
_NO_NEWLINE = "\\ No newline at end of file\n"
_GIT_S = 30


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file, as it is and as the patch makes it; `path` is relative to the patch's root."""

    path: str
    before: bytes
    after: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TunePatch:
    """`diff` is None where no file changes; `by_hand` says what a person has to do."""

    root: Path  # where the diff's paths begin
    by_hand: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)  # to set where the command is started
    changes: tuple[FileChange, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(change.path for change in self.changes)

    @property
    def diff(self) -> str | None:
        return "".join(map(_diff, self.changes)) or None


def make_patch(facts: ScriptFacts, chosen: Sequence[ChosenChange], root: Path) -> TunePatch:
    """The edits of all chosen remedies. `root` is where the command runs; what lies outside its git
    work tree is not edited, unless the script itself does: then that one's folder counts."""
    base = _users_folder(facts, root)

    def read(file: str) -> bytes | None:
        if _inside(base, file) is None:
            return None
        try:
            return read_whole(Path(file))
        except UnreadableInputError:
            return None

    patched = patch_source(facts, chosen, read)
    changes = [
        FileChange(path, patched.before[file], after)
        for file, after in patched.after.items()
        if (path := _inside(base, file)) is not None
    ]
    return TunePatch(
        root=base,
        by_hand=patched.by_hand,
        variables=patched.variables,
        changes=tuple(sorted(changes, key=lambda change: change.path)),
    )


def require_applicable(command: Sequence[str], folder: Path) -> None:
    """Before hours of trials: UsageError if what `--apply` would change surely cannot be changed.

    The files are not known yet; those that the command names are the likely ones."""
    named = [path for word in command if (path := folder / word).suffix == ".py" and path.is_file()]
    for root in {_work_tree(path.parent) for path in named} or {_work_tree(folder)}:
        inside = [name for path in named if (name := _inside(root, str(path))) is not None]
        _require_clean(root, inside)


def apply_patch(patch: TunePatch) -> tuple[Path, ...]:
    """Change the files. UsageError unless git has all of them as they are now."""
    if not patch.changes:
        return ()
    _require_clean(patch.root, patch.files)
    paths = [patch.root / change.path for change in patch.changes]
    for path, change in zip(paths, patch.changes, strict=True):
        if read_whole(path) != change.before:
            raise UsageError(
                f"{path} changed while tune ran. Tune again, or apply the diff by hand"
            )
    _write_all(paths, [change.after for change in patch.changes])
    return tuple(paths)


def _require_clean(root: Path, files: Sequence[str]) -> None:
    by_hand = "or leave out --apply and use the diff"
    if _git(root, "rev-parse", "--is-inside-work-tree").strip() != "true":
        raise UsageError(
            f"--apply changes files only in a git work tree, and {root} is not one. Commit "
            f"the script to one, {by_hand}"
        )
    if not files:
        return
    names = ["--", *(f":(literal){name}" for name in files)]
    known = _git(root, "ls-files", "-z", *names).split("\0")
    changed = _git(root, "status", "--porcelain", "-z", *names)
    if unknown := [name for name in files if name not in known]:
        raise UsageError(f"git does not track {', '.join(unknown)}: commit it first, {by_hand}")
    if changed:
        raise UsageError(
            f"{', '.join(files)}: some changes are not committed. Commit or stash them first, "
            f"{by_hand}"
        )


def _git(folder: Path, *words: str) -> str:
    """What git answers; nothing if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, timeout=_GIT_S, check=False
        )
    except FileNotFoundError:
        raise UsageError("--apply needs git, which is not installed: use the diff") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"git did not answer within {_GIT_S} s: use the diff") from None
    return os.fsdecode(done.stdout) if done.returncode == 0 else ""


def _write_all(paths: Sequence[Path], texts: Sequence[bytes]) -> None:
    """Every file is complete at each moment; none is changed if one of them cannot be written."""
    written: list[tuple[Path, Path]] = []
    try:
        for path, text in zip(paths, texts, strict=True):
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
            written.append((Path(name), path))
            with os.fdopen(handle, "wb") as file:
                file.write(text)
            Path(name).chmod(path.stat().st_mode)
        for temporary, path in written:
            temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}; use the diff instead") from None
    finally:
        for temporary, _ in written:
            with suppress(OSError):
                temporary.unlink()


def _users_folder(facts: ScriptFacts, root: Path) -> Path:
    """The git work tree around `root`, or `root` itself; the script's if it lies elsewhere."""
    base = _work_tree(root)
    frames = (*facts.forward, *facts.backward, *(f for one in facts.built for f in one.frames))
    files = [frame.file for frame in frames]
    if not files or any(_inside(base, file) is not None for file in files):
        return base
    return _work_tree(Path(files[0]).parent)


def _work_tree(folder: Path) -> Path:
    folder = folder.resolve()
    for parent in (folder, *folder.parents):
        if (parent / ".git").exists():
            return parent
    return folder


def _inside(base: Path, file: str) -> str | None:
    """Its path from there; None for what lies outside, in a library, or has no writable name."""
    try:
        path = Path(file).resolve().relative_to(base)
    except (OSError, ValueError):
        return None
    name = path.as_posix()
    if _LIBRARIES.intersection(path.parts) or _NOT_IN_HEADERS.search(name):
        return None
    return name


def _diff(change: FileChange) -> str:
    before, after = _lines(change.before), _lines(change.after)
    end = "\t" if " " in change.path else ""  # where a name with spaces ends
    lines = difflib.unified_diff(before, after, f"a/{change.path}", f"b/{change.path}")
    return "".join(_ended(lines, end))


def _lines(text: bytes) -> list[str]:
    """Only \\n ends a line of a diff: \\r and others belong to it."""
    lines = [f"{line}\n" for line in text.decode().split("\n")]
    last = lines.pop().removesuffix("\n")
    return [*lines, last] if last else lines


def _ended(lines: Iterator[str], end: str) -> Iterator[str]:
    for number, line in enumerate(lines):
        if number < 2:
            yield line.removesuffix("\n") + end + "\n"
        else:
            yield line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}"
