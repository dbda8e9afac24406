"""Put one question to the command, in this process, and keep what it answers."""

from __future__ import annotations

import hashlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lock.corpus import Question


@dataclass(frozen=True)
class Answer:
    name: str
    exit_code: int
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode(errors="surrogateescape")).hexdigest()[:16]


def answer(question: Question) -> Answer:
    from stepscope.__main__ import run

    os.chdir(question.folder)
    if question.arguments[0] == "patch":
        from lock.patches import patches

        text = patches(Path(question.arguments[1]), device=question.arguments[2])
        return Answer(question.name, 0, normal(text, question.folder, question.folder))
    os.environ |= {"COLUMNS": str(question.columns), "NO_COLOR": "1"}
    page = Path(os.environ["XDG_CACHE_HOME"]).parent / f"{os.getpid()}.html"
    sys.argv = [
        "stepscope",
        *(str(page) if word == "PAGE" else word for word in question.arguments),
    ]
    streams, printed = (sys.stdout, sys.stderr), io.BytesIO()
    stream = io.TextIOWrapper(printed, "utf-8", write_through=True)
    sys.stdout = sys.stderr = stream
    try:
        run()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout, sys.stderr = streams
    stream.flush()
    text = printed.getvalue().decode()
    if page.exists():
        text += page.read_text()
        page.unlink()
    return Answer(question.name, code, normal(text, question.folder, page))


def normal(text: str, folder: Path, page: Path) -> str:
    """Return the text without what differs from place to place."""
    return text.replace(str(page), "PAGE").replace(str(folder), "FOLDER")
