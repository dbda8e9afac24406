"""All pages of an answer of `stepscope mcp`, each checked against the bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stepscope.ui.mcp.pages import MOST_TOKENS, TEXT_TOKENS, count_tokens, to_json
from stepscope.ui.mcp.worker import Answers


def pages_of(answers: Answers, tool: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield all pages, each checked against the bound."""
    cursor: dict[str, str] = {}
    while True:
        page = answers.page(tool, {**arguments, **cursor})
        assert count_tokens(to_json(page)) <= MOST_TOKENS - TEXT_TOKENS, list(page)
        yield page
        if "cursor" not in page:
            return
        cursor = {"cursor": page["cursor"]}
