"""Changes of files as edits that an editor applies, and can undo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lsprotocol import types
from pygls.uris import from_fs_path

from stepscope.ui.lsp.rebased_change import text_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stepscope.ui.lsp.open_file import OpenFile
    from stepscope.ui.lsp.rebased_change import LineChange
    from stepscope.ui.lsp.script_state import TextOf


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceEdits:
    """`units` counts a text's length as the editor does; `versioned` if it takes versions."""

    open_files: Mapping[Path, OpenFile]
    text_of: TextOf
    units: Callable[[str], int]
    versioned: bool

    def of(self, changes: Mapping[str, Sequence[LineChange]]) -> types.WorkspaceEdit:
        """Whole lines of several files, by path."""
        edits: dict[Path, list[types.TextEdit]] = {}
        for name, lines in changes.items():
            text = text_lines(self.text_of(Path(name)) or "")
            edits[Path(name)] = [self._lines(text, change) for change in lines]
        return self.of_edits(edits)

    def of_edits(self, edits: Mapping[Path, Sequence[types.TextEdit]]) -> types.WorkspaceEdit:
        """With versions an editor refuses edits of a text that has changed meanwhile."""
        if not self.versioned:
            return types.WorkspaceEdit(
                changes={self._uri(path): list(some) for path, some in edits.items()}
            )
        return types.WorkspaceEdit(
            document_changes=[
                types.TextDocumentEdit(
                    types.OptionalVersionedTextDocumentIdentifier(
                        uri=self._uri(path), version=self._version(path)
                    ),
                    list(some),
                )
                for path, some in edits.items()
            ]
        )

    def _uri(self, path: Path) -> str:
        known = self.open_files.get(path)
        return known.uri if known is not None else from_fs_path(str(path)) or str(path)

    def _version(self, path: Path) -> int | None:
        known = self.open_files.get(path)
        return known.version if known is not None else None

    def _lines(self, text: Sequence[str], change: LineChange) -> types.TextEdit:
        """The last line of a text may lack its end."""
        start, end = types.Position(change.start, 0), types.Position(change.end, 0)
        if change.end == len(text) and text and not text[-1].endswith("\n"):
            end = types.Position(len(text) - 1, self.units(text[-1]))
            if change.start == len(text):
                start = end
        return types.TextEdit(range=types.Range(start, end), new_text="".join(change.lines))
