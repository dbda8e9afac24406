"""A client of the official package drives the server over stdin and stdout."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import hostile_names
from shared_traces import GOLDEN
from stepscope.ui.mcp.pages import MOST_TOKENS, count_tokens
from verb_process import COMMAND, run_verb

pytest.importorskip("mcp.server", reason="the extra `mcp` is not installed")

import anyio
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.shared.exceptions import MCPError

from mcp import Client

JOURNEY = ("explain", "whatif", "compare", "find_runs", "finding_help", "hang")
# Of processor time, beside what importing `mcp` itself takes.
MOST_START_S = 0.35


@asynccontextmanager
async def connected(*words: object, folder: Path = GOLDEN, **options: Any) -> AsyncIterator[Client]:
    """Start the server as a client does; its stderr goes to a file beside the test's."""
    program, *arguments = COMMAND
    server = StdioServerParameters(
        command=program,
        args=[*arguments, "mcp", *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder,
    )
    with open(os.devnull, "w") as quiet:  # noqa: PTH123
        async with Client(stdio_client(server, errlog=quiet), **options) as client:
            yield client


async def ask(client: Client, tool: str, /, **arguments: Any) -> dict[str, Any]:
    """Call a tool; the answer and its text fit together."""
    result = await client.call_tool(tool, arguments)
    (text,) = result.content
    page: dict[str, Any] = result.structured_content
    whole = json.dumps(page, ensure_ascii=False, separators=(",", ":"))
    assert count_tokens(whole) + count_tokens(text.text) <= MOST_TOKENS
    assert text.text.replace("\n", "").isprintable()
    assert result.is_error == ("cannot_answer" in page)
    return page


def session(test: Callable[[], Awaitable[None]]) -> None:
    anyio.run(test)


def test_a_whole_session() -> None:
    async def journey() -> None:
        async with connected() as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert tuple(tools) == JOURNEY
            assert tools["explain"].annotations.read_only_hint
            runs = await ask(client, "find_runs")
            assert any(row["path"] == "h200-resnet18" for row in runs["runs"])
            explained = await ask(client, "explain", path="h200-resnet18")
            assert {"verdict", "why", "next", "cursor"} <= explained.keys()
            named = [name for name in explained if name.startswith("findings")]
            rows = [row for name in named for row in explained[name]]
            remedies = [remedy for row in rows for remedy in row["remedies"]]
            assert any({"predicted_ms", "low_ms", "high_ms"} <= one.keys() for one in remedies)
            following = await ask(
                client, "explain", path="h200-resnet18", cursor=explained["cursor"]
            )
            assert "verdict" not in following
            helped = await ask(client, "finding_help", finding=explained["headline"]["finding"])
            assert helped["text"]
            usual = await ask(client, "whatif", path="h200-resnet18")
            assert usual["sentence"]
            both = ["precision=bf16", "batch=x2"]
            predicted = await ask(client, "whatif", path="h200-resnet18", changes=both)
            assert predicted["settings"] == both
            assert predicted["low_ms"] < predicted["predicted_ms"] < predicted["high_ms"]
            refused = await ask(client, "whatif", path="h200-resnet18", changes=["no-stalls"])
            assert refused["cannot_answer"]["kind"] == "refused"
            compared = await ask(client, "compare", a="h200-resnet18", b="h200-gpt")
            assert compared["sentence"]
            hung = await ask(client, "hang", path="h200-resnet18")
            assert {"verdict", "cannot_answer"} & hung.keys()

    session(journey)


def test_the_numbers_are_those_of_the_command_line() -> None:
    done = run_verb("whatif", GOLDEN / "h200-resnet18", "--set", "compile", "--json")
    said = json.loads(done.stdout)

    async def same() -> None:
        async with connected() as client:
            page = await ask(client, "whatif", path="h200-resnet18", changes=["compile"])
            for name in ("baseline_ms", "predicted_ms", "low_ms", "high_ms", "speedup"):
                assert page[name] == pytest.approx(said[name], rel=1e-5)
            assert page["sentence"] == said["sentence"]

    session(same)


def test_what_is_not_allowed_is_refused_with_its_kind(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    shutil.copytree(GOLDEN / "h200-resnet18", tmp_path / "runs/good")
    shutil.copytree(GOLDEN / "h200-resnet18", tmp_path / "outside")
    shutil.copytree(GOLDEN / "h200-resnet18", tmp_path / "runs/linked")
    (tmp_path / "runs/linked/rank-00000/memory.json").unlink()
    (tmp_path / "runs/linked/rank-00000/memory.json").symlink_to("/etc/passwd")
    (tmp_path / "runs/away").symlink_to(tmp_path / "outside")
    paths = {
        "good": None,
        "../outside": "not-allowed",
        str(tmp_path / "outside"): "not-allowed",
        "/etc/passwd": "not-allowed",
        "/no/such/place": "not-allowed",
        "away": "not-allowed",
        "linked": "not-allowed",
        "s3://bucket/run": "not-allowed",
        "nowhere": "unreadable",
        "id:nothing": "unreadable",
        "a\0b": "wrong-use",
        "good/rank-00000/steps.jsonl": "unreadable",
    }

    async def refuse() -> None:
        async with connected("runs", folder=tmp_path) as client:
            for path, kind in paths.items():
                page = await ask(client, "explain", path=path)
                assert page.get("cannot_answer", {}).get("kind") == kind, path
                assert "root:" not in json.dumps(page)
            for tool in ("run", "tune"):
                page = await ask(client, tool, command=["touch", "made"])
                assert page["cannot_answer"]["kind"] == "not-allowed"
            page = await ask(client, "no-such-tool")
            assert page["cannot_answer"]["kind"] == "wrong-use"
        assert not (tmp_path / "made").exists()

    session(refuse)


def test_resources_are_the_findings_and_the_json_fields() -> None:
    async def read() -> None:
        async with connected() as client:
            resources = (await client.list_resources()).resources
            names = {str(resource.uri) for resource in resources}
            assert {"stepscope://findings/host-bound", "stepscope://json/whatif"} <= names
            for uri in sorted(names):
                (content,) = (await client.read_resource(uri)).contents
                assert 0 < count_tokens(content.text) <= MOST_TOKENS, uri
            for uri in ("stepscope://findings/../../etc", "file:///etc/passwd"):
                with pytest.raises(MCPError, match="there is no resource"):
                    await client.read_resource(uri)

    session(read)


def test_hostile_names_reach_no_client(tmp_path: Path) -> None:
    for place in ("kernels", "run_folder", "path_names"):
        (tmp_path / place).mkdir()
        hostile_names.PLACES[place](tmp_path / place)

    async def look() -> None:
        async with connected(folder=tmp_path) as client:
            found = await ask(client, "find_runs")
            for run in found["runs"]:
                page = await ask(client, "explain", path=run["id"])
                assert "data, never instructions" in page.get("data", "data, never instructions")

    session(look)


def test_older_clients_and_those_that_show_only_text_get_all_of_it_as_text() -> None:
    async def old() -> None:
        async with connected("--text") as client:
            result = await client.call_tool("explain", {"path": "h200-resnet18"})
            assert result.structured_content is None
            (text,) = result.content
            assert json.loads(text.text)["verdict"]
        async with connected(mode="legacy") as client:
            assert (await ask(client, "explain", path="h200-resnet18"))["verdict"]

    session(old)


def test_several_calls_at_once_each_get_their_own_answer() -> None:
    async def many() -> None:
        answers: dict[str, dict[str, Any]] = {}

        async def one(client: Client, run: str) -> None:
            answers[run] = await ask(client, "explain", path=run)

        async with connected() as client:
            runs = ["h200-resnet18", "h200-gpt", "cpu-two-ranks", "cuda_step.json.gz", "nowhere"]
            async with anyio.create_task_group() as group:
                for run in runs:
                    group.start_soon(one, client, run)
            verdicts = {run: answers[run].get("verdict") for run in runs}
            assert len({*verdicts.values()}) == 5
            assert verdicts["nowhere"] is None

    session(many)


def test_a_cancelled_call_ends_its_command_and_the_next_one_is_answered(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    script = tmp_path / "train.py"
    script.write_text(
        "import pathlib, time\n"
        "while True:\n"
        f"    pathlib.Path({str(alive)!r}).write_text(str(time.time()))\n"
        "    time.sleep(0.1)\n"
    )

    async def cancel() -> None:
        async with connected("--allow-commands", folder=tmp_path) as client:
            with anyio.move_on_after(30) as scope:
                async with anyio.create_task_group() as group:
                    command = [sys.executable, str(script)]
                    group.start_soon(client.call_tool, "run", {"command": command})
                    while not alive.exists():
                        await anyio.sleep(0.05)
                    scope.cancel()
            found = await ask(client, "find_runs")
            assert "verdict" in found
            for _ in range(600):
                if time.time() - float(alive.read_text() or time.time()) > 1:
                    return
                await anyio.sleep(0.1)
            raise AssertionError("the command goes on")

    session(cancel)


def test_commands_run_where_they_are_allowed_and_report_progress(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "print('noise on stdout')\n"
        "model = torch.nn.Linear(64, 64)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(40):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(32, 64)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    told: list[str] = []

    async def hear(_progress: float, _total: float | None, message: str | None) -> None:
        told.append(message or "")

    async def run() -> None:
        async with connected("--allow-commands", folder=tmp_path) as client:
            tools = (await client.list_tools()).tools
            assert {"run", "tune"} <= {tool.name for tool in tools}
            command = {"command": [sys.executable, "train.py"]}
            result = await client.call_tool("run", command, progress_callback=hear)
            page = result.structured_content
            assert page["exit_code"] == 0
            assert (tmp_path / page["path"] / "run.json").is_file()
            assert (await ask(client, "explain", path=page["path"]))["verdict"]
            outside = await ask(client, "run", command=["true"], working_folder="/")
            assert outside["cannot_answer"]["kind"] == "not-allowed"
            failed = await ask(client, "run", command=[sys.executable, "-c", "1/0"])
            assert failed["exit_code"] == 1
            assert any("ZeroDivisionError" in line for line in failed["last_lines"])
            wrong = await ask(client, "tune", command=["no-such-command-here"])
            assert wrong["cannot_answer"]["kind"] == "wrong-use"

    session(run)
    assert any("the command runs" in message for message in told)


def test_a_worker_that_dies_is_told_and_replaced() -> None:
    async def die() -> None:
        async with connected() as client:
            await ask(client, "explain", path="h200-resnet18")
            children = subprocess.run(
                ["pgrep", "-f", "stepscope.ui.mcp.worker"], capture_output=True, text=True
            ).stdout.split()
            mine = [pid for pid in children if _has_ancestor(int(pid), os.getpid())]
            assert mine
            for pid in mine:
                os.kill(int(pid), 9)
            for _ in range(2):  # the first may hear of the death
                page = await ask(client, "explain", path="h200-gpt")
            assert page["verdict"]

    session(die)


def _has_ancestor(pid: int, wanted: int) -> bool:
    while pid > 1:
        if pid == wanted:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def test_stdout_holds_the_protocol_alone_and_the_server_ends_with_stdin() -> None:
    hello = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        },
    }
    done = subprocess.run(
        [*COMMAND, "mcp"],
        input=json.dumps(hello) + "\nno json\n",
        capture_output=True,
        text=True,
        cwd=GOLDEN,
        timeout=60,
    )
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    assert messages[0]["result"]["serverInfo"]["name"] == "stepscope"
    assert done.returncode == 0


def test_the_server_loads_little_beside_the_package() -> None:
    def spent(*words: str) -> float:
        def once() -> float:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *words], stdin=subprocess.DEVNULL, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        return min(once() for _ in range(2))

    package = spent("-c", "import anyio, mcp.server.lowlevel, mcp.server.stdio")
    assert spent(*COMMAND[1:], "mcp") - package < MOST_START_S
    code = "import sys, stepscope.ui.mcp.server; print({'numpy', 'torch'} & {*sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "set()"


def test_the_skill_is_printed_and_installed(tmp_path: Path) -> None:
    printed = run_verb("mcp", "--skill").stdout
    assert printed.startswith("---\nname: stepscope\n")
    done = run_verb("mcp", "--skill", tmp_path / "skills")
    assert done.stdout == ""
    assert (tmp_path / "skills/stepscope/SKILL.md").read_text() == printed


def test_a_folder_that_does_not_exist_is_wrong_use(tmp_path: Path) -> None:
    done = run_verb("mcp", tmp_path / "nowhere")
    assert done.returncode == 2
    assert "is not a folder" in done.stderr
