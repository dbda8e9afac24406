"""`stepscope serve` as a process: ports, signals, clients that leave, workers that hang or die."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from served_folders import TOKEN, add_run
from stepscope.errors import NotCapturedError, StepscopeError, UsageError
from stepscope.ui.serve.app import open_port
from stepscope.ui.serve.listed_runs import text_of
from stepscope.ui.serve.served_runs import WorkerError, WorkerPool, WorkerProcess

PATIENCE_S = 60


class RunningServer:
    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stepscope", "serve", *options],
            env=os.environ | {"STEPSCOPE_SERVE_TOKEN": TOKEN},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.address = next(iter(re.findall(r"http://[\d.:]+", self.line)), "")

    def client(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {TOKEN}"}
        return httpx.Client(base_url=self.address, headers=headers, timeout=PATIENCE_S)

    def end(self, number: int) -> tuple[int, str]:
        """Exit code and what was said on stderr."""
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, said


@pytest.fixture
def start(root: Path) -> Iterator[Any]:
    servers: list[RunningServer] = []

    def begin(*options: str) -> RunningServer:
        servers.append(RunningServer(str(root), *options))
        return servers[-1]

    yield begin
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_runs(client: httpx.Client) -> list[dict[str, Any]]:
    """Until every run has been read."""
    import time

    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        rows: list[dict[str, Any]] = client.get("/runs.json").json()["runs"]
        if rows and all(row["state"] for row in rows):
            return rows
        time.sleep(0.1)
    raise AssertionError("the runs were not read")


def test_it_serves_this_machine_and_stops_on_ctrl_c(start):
    server = start("--port", "0")
    assert f"?token={TOKEN}" in server.line
    assert server.address.startswith("http://127.0.0.1:")
    with server.client() as client:
        assert client.get("/runs.json").json() == {"schema": 1, "runs": []}
    code, said = server.end(signal.SIGINT)
    assert code == 0
    assert "stopped" in said


@pytest.mark.slow
def test_clients_that_leave_do_no_harm_and_no_worker_outlives_the_server(start, root):
    add_run(root, "one", trace=True)
    server = start("--port", "0")
    with server.client() as client:
        (row,) = wait_for_runs(client)
        port = int(server.address.rpartition(":")[2])
        for _ in range(5):  # ask for something long and leave
            with socket.create_connection(("127.0.0.1", port)) as leaving:
                leaving.sendall(
                    f"GET /runs/{row['id']}/report HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                    f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
                )
        assert "stepscope" in client.get(f"/runs/{row['id']}/report").text
        workers = children(server.process.pid)
    code, said = server.end(signal.SIGINT)
    assert code == 0
    assert "Traceback" not in said
    assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]


def test_a_port_in_use_is_named_with_one_that_is_free(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError) as refused:
            open_port(port)
    message = " ".join(map(str, refused.value.args))
    assert f"port {port} of 127.0.0.1 is in use" in message
    free = int(re.search(r"--port (\d+)", message)[1])  # type: ignore[index]
    open_port(free).close()


@pytest.mark.slow
def test_killed_and_started_again_nothing_is_lost(start, root):
    add_run(root, "one")
    first = start("--port", "0")
    with first.client() as client:
        (before,) = wait_for_runs(client)
        client.post(f"/runs/{before['id']}/tags", data={"tags": "kept"})
    first.end(signal.SIGKILL)
    again = start("--port", "0")
    with again.client() as client:
        (after,) = client.get("/runs.json").json()["runs"]
    assert after["step_ms"] == before["step_ms"]
    assert after["tags"] == ["kept"]


@pytest.mark.parametrize(
    ("options", "words"),
    [(("nowhere",), "does not exist"), (("--port", "70000"), "70000"), (("file",), "not a folder")],
)
def test_wrong_use_is_one_sentence(options, words, tmp_path, monkeypatch):
    from click.testing import CliRunner

    from stepscope.ui.cli.serve import command

    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(command, options)
    assert done.exit_code != 0
    assert words in f"{done.output}{done.exception}"


def test_a_token_that_is_easily_guessed_is_refused(root, monkeypatch):
    from click.testing import CliRunner

    from stepscope.ui.cli.serve import command

    monkeypatch.setenv("STEPSCOPE_SERVE_TOKEN", "short")
    done = CliRunner().invoke(command, [str(root)])
    assert isinstance(done.exception, UsageError)


@pytest.mark.slow
def test_a_worker_is_killed_after_its_limit_and_comes_back(root):
    folder = add_run(root, "one")
    worker = WorkerProcess()
    try:
        with pytest.raises(WorkerError, match="stopped after"):
            worker.ask(0.001, job="summarise", path=text_of(folder), kind="run")
        answer = worker.ask(PATIENCE_S, job="summarise", path=text_of(folder), kind="run")
        assert answer["state"] == "finished"
        with pytest.raises(NotCapturedError, match="no trace"):
            worker.ask(PATIENCE_S, job="report", path=text_of(folder), target=text_of(root / "x"))
        with pytest.raises(StepscopeError, match="a defect"):
            worker.ask(PATIENCE_S, job="no such job")
        os.kill(worker._child.pid, signal.SIGKILL)  # type: ignore[union-attr]
        worker._child.wait(PATIENCE_S)  # type: ignore[union-attr]
        answer = worker.ask(PATIENCE_S, job="summarise", path=text_of(folder), kind="run")
        assert answer["state"] == "finished"
    finally:
        worker.close()
    with pytest.raises(WorkerError, match="stopping"):
        worker.ask(1, job="summarise")


def test_a_worker_that_dies_during_a_job_is_said_to_have_died():
    dying = [sys.executable, "-c", "import sys; sys.stdin.readline()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    worker = WorkerProcess()
    worker._child = subprocess.Popen(dying, start_new_session=True, bufsize=0, **pipes)
    with pytest.raises(WorkerError, match="was killed, perhaps because memory ran out"):
        worker.ask(PATIENCE_S, job="summarise")


def test_too_many_requests_are_turned_away():
    pool = WorkerPool(1, most_waiting=0)
    with pool.worker(), pytest.raises(WorkerError, match="too many"), pool.worker():
        pass
    with pool.worker():
        pass
    pool.close()
