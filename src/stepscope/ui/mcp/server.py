"""The server: the Model Context Protocol on stdin and stdout, by the official package.

It reads no run itself. Workers do, so that a call can be cancelled and a run that needs too much
memory takes nothing else with it. Only this file imports `mcp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError

from stepscope import __version__
from stepscope.errors import UsageError
from stepscope.ui.json_text import cannot_answer
from stepscope.ui.mcp.ask_worker import Report, Workers
from stepscope.ui.mcp.commands import run_training, tune_training
from stepscope.ui.mcp.folders import AllowedFolders, NotAllowedError
from stepscope.ui.mcp.pages import DATA, TEXT_TOKENS, clean, clean_text, count_tokens, to_json
from stepscope.ui.mcp.tools import (
    TOOLS,
    Question,
    RunQuestion,
    TuneQuestion,
    input_schema,
    list_resources,
    parse_question,
    read_resource,
)

_STRUCTURED_SINCE = "2025-06-18"  # older clients know text only
_INSTRUCTIONS = f"""\
stepscope tells where the steps of a PyTorch training go, what to change, and what that saves. \
find_runs lists recorded runs; explain gives verdict, why and next; finding_help has a finding's \
page; whatif predicts changes; compare tells whether a change was real; hang says who hangs. \
Answers have at most 2,000 tokens: `cursor` leads to the next page, `part` to one table. Numbers \
have six digits; what is absent is not known, never zero. `cannot_answer` says why there is no \
answer. {DATA}"""
_ANSWER_SCHEMA = {
    "type": "object",
    "required": ["schema"],
    "properties": {
        "schema": {"type": "integer"},
        "data": {"type": "string"},
        "verdict": {"type": "string"},
        "sentence": {"type": "string"},
        "why": {"type": "string"},
        "next": {"type": "string"},
        "cursor": {"type": "string"},
        "parts": {"type": "array", "items": {"type": "string"}},
        "cannot_answer": {
            "type": "object",
            "required": ["kind", "reason", "next"],
            "properties": {name: {"type": "string"} for name in ("kind", "reason", "next")},
        },
    },
}

_Context = Any  # a ServerRequestContext, whose type parameters say nothing here


def serve(roots: Sequence[Path], *, allow_commands: bool, text_only: bool) -> None:
    """Serve one client until it closes our stdin."""
    folders = AllowedFolders(roots)
    anyio.run(partial(_serve, folders, allow_commands, text_only))


async def _serve(folders: AllowedFolders, allow_commands: bool, text_only: bool) -> None:
    async with Workers(folders.roots) as workers, stdio_server() as (requests, answers):
        answering = _Tools(folders, workers, allow_commands, text_only)
        server: Server[Any] = Server(
            "stepscope",
            version=__version__,
            instructions=_INSTRUCTIONS,
            on_list_tools=answering.list_tools,
            on_call_tool=answering.call,
            on_list_resources=_list_resources,
            on_read_resource=_read_resource,
        )
        await server.run(requests, answers, server.create_initialization_options())


class _Tools:
    """What the protocol asks about tools."""

    def __init__(
        self, folders: AllowedFolders, workers: Workers, allow_commands: bool, text_only: bool
    ) -> None:
        self._folders = folders
        self._workers = workers
        self._allows_commands = allow_commands
        self._text_only = text_only

    async def list_tools(
        self, _context: _Context, _page: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        tools = [
            types.Tool(
                name=name,
                description=tool.about,
                input_schema=input_schema(tool.question),
                output_schema=None if self._text_only else _ANSWER_SCHEMA,
                annotations=types.ToolAnnotations(
                    read_only_hint=not tool.runs_commands,
                    destructive_hint=tool.runs_commands,
                    open_world_hint=tool.runs_commands,
                ),
            )
            for name, tool in TOOLS.items()
            if self._allows_commands or not tool.runs_commands
        ]
        return types.ListToolsResult(tools=tools)

    async def call(
        self, context: _Context, asked: types.CallToolRequestParams
    ) -> types.CallToolResult:
        async def report(seconds: float, words: str) -> None:
            await context.session.report_progress(seconds, None, words)

        try:
            page = await self._page(asked.name, asked.arguments or {}, report)
        except Exception as error:
            page = clean(cannot_answer(error))
        # A protocol's version is a date.
        as_text = self._text_only or str(context.protocol_version) < _STRUCTURED_SINCE
        return types.CallToolResult(
            content=[types.TextContent(text=to_json(page) if as_text else _sentences(page))],
            structured_content=None if as_text else page,
            is_error="cannot_answer" in page,
        )

    async def _page(self, name: str, arguments: dict[str, Any], report: Report) -> dict[str, Any]:
        tool = TOOLS.get(name)
        if tool is not None and tool.runs_commands:
            if not self._allows_commands:
                raise NotAllowedError(
                    f"{name} runs commands, and the user of this server did not allow that",
                    "ask the user to start it with: stepscope mcp --allow-commands",
                )
            return await self._command(parse_question(name, arguments), report)
        return await self._workers.ask(name, arguments, report)

    async def _command(self, question: Question, report: Report) -> dict[str, Any]:
        """Run the command, then answer about its folder. A page never runs it once more."""
        if getattr(question, "command", ()) and (question.cursor or question.part):
            raise UsageError(
                "this would run the command again: `cursor` and `part` need an answer's folder",
                "ask explain with the run's path, or tune with the tune's folder and no command",
            )
        if isinstance(question, RunQuestion):
            ended = await run_training(question, self._folders, report)
            more = {"path": ended.folder, "exit_code": ended.code}
            more |= {"last_lines": ended.printed} if ended.code else {}
            page = await self._workers.ask("explain", {"path": ended.folder}, report, more)
            more |= {"last_lines": ended.printed} if "cannot_answer" in page else {}
            return {**page, **more}
        assert isinstance(question, TuneQuestion)
        if question.folder and question.command:
            raise UsageError("tune takes a command or the folder of an earlier tune")
        folder, more = question.folder, {}
        if question.command:
            ended = await tune_training(question, self._folders, report)
            folder, more = ended.folder, {"folder": ended.folder}
        arguments = {"folder": folder, "part": question.part, "cursor": question.cursor}
        return {**await self._workers.ask("tune", arguments, report, more), **more}


def _sentences(page: dict[str, Any]) -> str:
    """Return the short text beside an answer: its sentences, and where the rest is."""
    if (no := page.get("cannot_answer")) is not None:
        return f"Cannot answer ({no['kind']}): {no['reason']}\nNext: {no['next']}"
    said = [
        (label, page[name])
        for name, label in (("sentence", ""), ("why", "Why: "), ("next", "Next: "))
        if isinstance(page.get(name), str)
    ]
    if "sentence" not in page and isinstance(page.get("verdict"), str):
        said.insert(0, ("", page["verdict"]))
    rows = [name for name, value in page.items() if isinstance(value, list | dict)]
    lines = [label + clean_text(text) for label, text in said]
    lines.append(f"Here: {', '.join(rows) or 'all of it'}.")
    lines += [f"More: cursor {page['cursor']}"] if "cursor" in page else []
    while count_tokens("\n".join(lines)) > TEXT_TOKENS and len(lines) > 1:
        longest = max(range(len(lines)), key=lambda number: len(lines[number]))
        lines[longest] = f"{lines[longest][: len(lines[longest]) * 2 // 3]}…"
    return "\n".join(lines)


async def _list_resources(
    _context: _Context, _page: types.PaginatedRequestParams | None
) -> types.ListResourcesResult:
    resources = [
        types.Resource(uri=row.uri, name=row.name, description=row.about, mime_type=row.kind)
        for row in list_resources()
    ]
    return types.ListResourcesResult(resources=resources)


async def _read_resource(
    _context: _Context, asked: types.ReadResourceRequestParams
) -> types.ReadResourceResult:
    uri = str(asked.uri)
    try:
        kind, text = read_resource(uri)
    except UsageError as error:
        raise MCPError(types.INVALID_PARAMS, str(error), cannot_answer(error)) from None
    content = types.TextResourceContents(uri=uri, mime_type=kind, text=text)
    return types.ReadResourceResult(contents=[content])
