"""The worker: a child process of the server that reads runs and answers with one page at a time.

It takes a question per line on stdin and answers on the stdout that it was started with: lines of
progress, then the page. Whatever is printed goes to stderr. It ends when stdin closes.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.ui.json_text import cannot_answer
from stepscope.ui.mcp.folders import AllowedFolders
from stepscope.ui.mcp.pages import (
    DATA,
    CursorError,
    clean,
    count_tokens,
    fingerprint,
    list_parts,
    make_cursor,
    make_page,
    of_part,
    read_cursor,
    to_json,
)
from stepscope.ui.mcp.tools import TOOLS, Question, parse_question
from stepscope.ui.progress import reporting_to

_MOST_ANSWERS = 3
_CURSOR_GROWS = 16  # tokens, by the digits of its place and how letters and digits alternate
_REPORT_EVERY_S = 0.5

Report = Callable[[int, int], None]


class _Kept(NamedTuple):
    """An answer, its fingerprint, and what its files were like before they were read."""

    mark: str
    stamp: str
    answer: dict[str, Any]


class Answers:
    """Answers of this process. The last few are kept, so that their next pages cost nothing."""

    def __init__(self, folders: AllowedFolders) -> None:
        self._folders = folders
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def page(
        self, tool: str, arguments: dict[str, Any], beside: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return one page of an answer, or the typed reason why there is none.

        `beside` stands on the page as well."""
        try:
            return self._page(tool, arguments, beside or {})
        except MemoryError:
            return refusal(UnreadableInputError("this needs more memory than there is"))
        except OSError as error:
            where = f"{error.filename or 'a file'}: {error.strerror}"
            return refusal(UnreadableInputError(where))
        except Exception as error:  # the next question must still be answered
            return refusal(error)

    def _page(
        self, tool: str, arguments: dict[str, Any], more: Mapping[str, Any]
    ) -> dict[str, Any]:
        question = parse_question(tool, arguments)
        start, mark = read_cursor(question.cursor) if question.cursor else (0, "")
        whole = msgspec.structs.replace(question, cursor="", part="")
        asked = [tool, msgspec.to_builtins(whole)]
        kept = self._answer(asked, question, mark)
        own, answer = of_part(kept.mark, question.part), kept.answer
        if mark and mark != own:
            raise CursorError(
                "the cursor belongs to another question, or the run has changed since",
                "ask again without a cursor",
            )
        head: dict[str, Any] = {"schema": 1, "data": DATA, **more}
        foot: dict[str, Any] = {"cursor": make_cursor(start, own)}
        if not start and not question.part:
            foot["parts"] = list_parts(answer)
        beside = count_tokens(to_json(head | foot)) + _CURSOR_GROWS
        page = make_page(answer, question.part, start, beside)
        if start and not page.body:
            raise CursorError("the answer ends before this cursor", "ask again without a cursor")
        if page.following is None:
            return head | page.body
        return head | page.body | foot | {"cursor": make_cursor(page.following, own)}

    def _answer(self, asked: list[Any], question: Question, mark: str) -> _Kept:
        """Return a kept answer for its next page, and for a part of it if its files are as they
        were; else a new one."""
        key = to_json(asked)
        kept = self._kept.get(key)
        if kept is not None and of_part(kept.mark, question.part) == mark:
            return kept
        stamp = self._folders.stamp(question.paths)
        if kept is None or not question.part or mark or not stamp or kept.stamp != stamp:
            answer = TOOLS[asked[0]].answer(question, self._folders)
            kept = _Kept(fingerprint(asked, answer), stamp, answer)
            self._kept[key] = kept
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST_ANSWERS:
                self._kept.popitem(last=False)
        return kept


def refusal(error: Exception) -> dict[str, Any]:
    """Return the one form of no answer, with text of a bounded length."""
    said: dict[str, Any] = clean(cannot_answer(error))
    return said


def main() -> None:
    """Answer until stdin closes."""
    stdout = os.dup(1)
    answers = os.fdopen(stdout, "wb")
    os.dup2(2, 1)
    pages = Answers(AllowedFolders([Path(os.fsdecode(bytes.fromhex(w))) for w in sys.argv[1:]]))

    def send(message: dict[str, Any]) -> None:
        answers.write(to_json(message).encode("utf-8", "replace") + b"\n")
        answers.flush()

    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line)
        with reporting_to(_rarely(lambda read, total: send({"progress": [read, total]}))):
            page = pages.page(job["tool"], job["arguments"], job["beside"])
        send({"page": page})
        gc.collect()


def _rarely(report: Report) -> Report:
    last = 0.0

    def rare(read: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _REPORT_EVERY_S:
            last = now
            report(read, total)

    return rare


if __name__ == "__main__":
    main()
