"""The list: every folder as it is, whatever it holds and whatever it is called."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import threading
import time

import pytest

from live_runs import BEGAN_S, alive, gone, make_rows, write_rank, write_run, write_steps
from served_folders import add_run, add_tune
from stepscope.errors import NotCapturedError
from stepscope.ui.serve.listed_runs import RunsDirectory, run_id

OWN = {"origin": "http://127.0.0.1:8763"}
MARKUP = '<img src=x onerror="alert(1)">{{ 7 * 7 }}'


def rows(client):
    return {row["name"]: row for row in client.get("/runs.json").json()["runs"]}


def refresh(client):
    client.served.keeper.look()
    client.served.keeper.summarise_changed()


def test_a_run_has_its_step_device_and_script(serve, root):
    add_run(root, "one", step_ms=20.0, folder="/home/me")
    row = rows(serve())["one"]
    assert row["step_ms"] == pytest.approx(20.1, abs=0.05)
    assert row["low_ms"] < row["step_ms"] < row["high_ms"]
    assert row["device"] == "NVIDIA H200"
    assert row["script"] == "/home/me/train.py"
    assert row["state"] == "finished"
    assert row["mfu"] is None


def test_every_link_to_a_scripts_trend_leads_somewhere(serve, root):
    """A tune has no step of its own, and a run that was not measured has none."""
    add_run(root, "one", step_ms=20.0)
    add_tune(root, "tuned")
    client = serve()
    links = re.findall(r'href="(/trends\?[^"]*)"', client.get("/").text)
    assert len(links) == 1
    assert client.get(links[0].replace("&amp;", "&")).status_code == 200


def test_the_states_of_runs(serve, root):
    add_run(root, "finished")
    add_run(root, "failed", code=3)
    for name, process in (("running", alive()), ("killed", gone())):
        write_run(root / name, process=process)
        write_rank(root / name / "rank-00000", process=process)
        write_steps(root / name / "rank-00000", make_rows([10.0] * 30))
    (root / "half").mkdir()
    (root / "half" / "run.json").write_text('{"command": ["py')
    (root / "empty").mkdir()
    (root / "20261116-101500-train").mkdir()
    (root / "20261116-101500-train" / "log.txt").write_text("")
    (root / "notes").mkdir()
    (root / "notes" / "log.txt").write_text("")
    add_tune(root, "tuned")
    found = rows(serve())
    states = {name: row["state"] for name, row in found.items()}
    assert states == {
        "finished": "finished",
        "failed": "failed",
        "running": "running",
        "killed": "not closed",
        "half": "broken",
        "empty": "broken",
        "20261116-101500-train": "broken",
        "tuned": "finished",
    }
    assert "exit code 3" in found["failed"]["problem"]
    assert "half written" in found["half"]["problem"]
    assert "neither run.json nor ranks" in found["empty"]["problem"]
    assert found["tuned"]["kind"] == "tune"


def test_the_traces_give_verdict_and_the_list_is_sorted_by_what_is_known(serve, root):
    add_run(root, "traced", trace=True, started_unix=BEGAN_S)
    add_run(root, "bare", started_unix=BEGAN_S + 10)
    client = serve()
    while client.served.keeper.explain_next():
        pass
    found = rows(client)
    assert found["traced"]["verdict"]
    assert found["bare"]["verdict"] is None
    assert "no trace" in found["bare"]["problem"]
    page = client.get("/", params={"sort": "started_unix", "down": "0"}).text
    assert page.index(">traced<") < page.index(">bare<")


def test_hostile_names_are_shown_and_never_become_markup_or_paths(serve, root):
    names = [
        MARKUP.replace("/", ""),
        "line\nbreak\x1b[2J",
        "..hidden",
        "-rf",
        "a" * 200,
        b"\xff\xfe",
    ]
    for name in names:
        add_run(root, name, command=["python", f"{MARKUP}.py"])
    client = serve()
    page = client.get("/").text
    assert "<img" not in page
    assert "{{ 7" in page
    assert "\x1b" not in page
    assert "line␊break" in page
    for row in rows(client).values():
        run = client.get(f"/runs/{row['id']}")
        assert run.status_code == 200
        assert "<img" not in run.text
    assert len(rows(client)) == len(names) - 1  # hidden folders are left out


def test_values_that_make_no_sense_are_left_out_and_stop_nobody(serve, root):
    add_run(root, "huge", world_size=10**30, started_unix=BEGAN_S, exit_code=10**20)
    add_run(root, "odd", world_size=-5, started_unix=1e308, command=[1, {}], folder=7)
    add_run(root, "surrogate", command=["python", "\udc80.py"], device="\udc80")
    add_run(root, "a good one")
    os.mkfifo(root / "a good one" / "fifo")
    (root / "fifo").mkdir()
    os.mkfifo(root / "fifo" / "run.json")
    found = rows(serve())
    assert found["huge"]["world_size"] in (None, 1)
    assert found["odd"]["script"] is None
    assert found["a good one"]["step_ms"] is not None
    assert all(row["state"] for row in found.values())
    assert found["fifo"]["state"] == "broken"


def test_links_out_of_the_folder_are_listed_and_not_followed(serve, root, tmp_path):
    outside = add_run(tmp_path / "elsewhere", "secret")
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    add_run(root, "one")
    (root / "again").symlink_to(root / "one")
    client = serve()
    found = rows(client)
    assert set(found) == {"link", "one"}
    assert "leads out" in found["link"]["problem"]
    assert client.get(f"/runs/{found['link']['id']}/report").status_code == 422


def test_a_folder_that_becomes_a_link_is_not_read_any_more(serve, root, tmp_path):
    outside = add_run(tmp_path / "elsewhere", "secret", trace=True)
    inside = add_run(root, "one", trace=True)
    client = serve()
    run = rows(client)["one"]["id"]
    shutil.rmtree(inside)
    inside.symlink_to(outside)
    assert client.get(f"/runs/{run}/report").status_code == 404


def test_a_removed_folder_is_said_to_be_gone_and_leaves_the_list(serve, root):
    folder = add_run(root, "one")
    client = serve()
    run = rows(client)["one"]["id"]
    shutil.rmtree(folder)
    answer = client.get(f"/runs/{run}/report")
    assert answer.status_code == 404
    assert "has been removed" in answer.text
    refresh(client)
    assert rows(client) == {}
    assert client.get(f"/runs/{run}").status_code == 404


def test_the_served_folder_itself_may_go_and_come_back(serve, root):
    add_run(root, "one")
    client = serve()
    away = root.with_name("away")
    root.rename(away)
    refresh(client)
    assert "not a folder any more" in client.get("/").text
    away.rename(root)
    refresh(client)
    assert "not a folder any more" not in client.get("/").text
    assert list(rows(client)) == ["one"]


def test_only_changed_folders_are_read_again(serve, root, monkeypatch):
    add_run(root, "one")
    two = add_run(root, "two")
    client = serve()
    asked = []
    ask = client.served.keeper.worker.ask

    def listen(limit_s, /, **job):
        asked.append(bytes.fromhex(job["path"]).decode())
        return ask(limit_s, **job)

    monkeypatch.setattr(client.served.keeper.worker, "ask", listen)
    refresh(client)
    assert asked == []
    write_steps(two / "rank-00000", make_rows([50.0] * 30))
    os.utime(two / "rank-00000" / "steps.jsonl", (1, 1))
    refresh(client)
    assert asked == [str(two)]
    assert rows(client)["two"]["step_ms"] == pytest.approx(50.0)


def test_runs_in_folders_of_folders_are_found(serve, root):
    add_run(root / "project" / "monday", "deep")
    add_tune(root, "tuned")
    add_run(root / "tuned", "baseline")
    add_run(root / "tuned" / "trials", "trial")
    assert set(rows(serve())) == {"project/monday/deep", "tuned", "tuned/baseline"}


def test_a_run_folder_may_be_served_itself(serve, root):
    for part in add_run(root.with_name("other"), "one").iterdir():
        part.rename(root / part.name)
    assert [row["step_ms"] is not None for row in rows(serve()).values()] == [True]


@pytest.mark.parametrize("damage", ["garbage", "other version", "missing column", "removed"])
def test_a_damaged_index_is_made_again_from_the_folders(serve, root, damage, cache_dir):
    add_run(root, "one")
    serve().served.close()
    (file,) = cache_dir.glob("serve/*/index-*.sqlite")
    if damage == "garbage":
        file.write_bytes(b"not a database" * 1000)
    elif damage == "removed":
        file.unlink()
    else:
        base = sqlite3.connect(file)
        if damage == "other version":
            base.execute("pragma user_version = 999")
        else:
            base.execute("alter table runs drop column verdict")
        base.commit()
        base.close()
    assert rows(serve())["one"]["step_ms"] is not None


def test_an_index_that_breaks_while_it_is_served_is_made_again(serve, root, cache_dir):
    add_run(root, "one")
    client = serve()
    base = sqlite3.connect(next(cache_dir.glob("serve/*/index-*.sqlite")))
    base.execute("drop table runs")
    base.commit()
    base.close()
    assert rows(client) == {}
    refresh(client)
    assert list(rows(client)) == ["one"]


def test_an_index_that_another_process_holds_is_kept_and_said(serve, root, cache_dir, monkeypatch):
    monkeypatch.setattr("stepscope.ui.serve.listed_runs._BUSY_S", 0.05)
    add_run(root, "one")
    client = serve()
    base = sqlite3.connect(next(cache_dir.glob("serve/*/index-*.sqlite")))
    base.execute("begin exclusive")
    add_run(root, "two")
    keeper = client.served.keeper
    keeper.look()
    assert "locked" in str(keeper.problem)
    assert "locked" in client.get("/").text
    base.rollback()
    base.close()
    refresh(client)
    assert set(rows(client)) == {"one", "two"}
    assert keeper.problem is None


def test_a_request_during_shutdown_does_not_remove_the_index(serve, root, cache_dir):
    add_run(root, "one")
    client = serve()
    client.served.close()
    assert client.get("/").status_code == 422
    assert rows(serve())["one"]["step_ms"] is not None


def test_the_index_is_there_at_once_when_the_server_comes_back(serve, root):
    add_run(root, "one", step_ms=20.0)
    first = serve()
    first.served.close()
    from stepscope.ui.serve.served_runs import ServedRuns

    again = ServedRuns.of_folder(root)
    try:
        assert [run.step_ms for run in again.index.runs()] == [pytest.approx(20.1, abs=0.05)]
    finally:
        again.close()


def test_a_new_run_is_listed_while_the_traces_of_another_are_read(serve, root, monkeypatch):
    monkeypatch.setattr("stepscope.ui.serve.served_runs._LOOK_EVERY_S", 0.01)
    add_run(root, "long", trace=True)
    client = serve()
    keeper, reads, release = client.served.keeper, threading.Event(), threading.Event()

    class Reader:
        def ask(self, *_, **__):
            reads.set()
            release.wait(60)
            raise NotCapturedError("read at last")

        def close(self):
            release.set()

    keeper.explainer = Reader()
    keeper.start()
    assert reads.wait(60)
    add_run(root, "new")
    until = time.monotonic() + 60
    while "new" not in rows(client):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not release.is_set()


def test_a_run_is_known_before_the_first_scan(root):
    folder = add_run(root, "one")
    directory = RunsDirectory(root)
    assert directory.folder_of(run_id(folder)) == folder
    assert directory.folder_of("unknown") is None


def test_nothing_is_written_into_run_folders(serve, root):
    add_run(root, "one", trace=True)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    client = serve()
    run = rows(client)["one"]["id"]
    client.get(f"/runs/{run}/report")
    client.post(f"/runs/{run}/tags", data={"tags": "a"}, headers=OWN)
    client.served.keeper.explain_next()
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_search_and_tags(serve, root, tags_dir):
    add_run(root, "alpha")
    add_run(root, "beta")
    client = serve()
    run = rows(client)["alpha"]["id"]
    path = f"/runs/{run}/tags"
    saved = client.post(path, data={"tags": f"baseline, {MARKUP[:30]} ,"}, headers=OWN)
    assert "baseline" in saved.text
    assert "<img" not in client.get("/").text
    assert rows(client)["alpha"]["tags"] == ["baseline", MARKUP[:30]]
    for search, found in (
        ("tag:baseline", True),
        ("BASEL", True),
        ("tag:base", False),
        ("alp", True),
    ):
        page = client.get("/rows", params={"q": search}).text
        assert (">alpha<" in page) is found
        assert ">beta<" not in page
    again = serve(rebuild=True)
    assert rows(again)["alpha"]["tags"] == ["baseline", MARKUP[:30]]
    assert (
        again.post(path, data={"tags": ",".join(map(str, range(30)))}, headers=OWN).status_code
        == 400
    )
    assert again.post(path, data={"tags": "x" * 9000}, headers=OWN).status_code == 413
    (file,) = tags_dir.glob("*.json")
    file.write_text("{broken")
    assert "is damaged" in again.post(path, data={"tags": "new"}, headers=OWN).text
    assert file.read_text() == "{broken"


def test_a_list_that_has_not_changed_is_not_sent_again(serve, root):
    add_run(root, "one")
    client = serve()
    tag = client.get("/rows").headers["etag"]
    assert client.get("/rows", headers={"if-none-match": tag}).status_code == 304
    run = rows(client)["one"]["id"]
    client.post(f"/runs/{run}/tags", data={"tags": "new"}, headers=OWN)
    assert client.get("/rows", headers={"if-none-match": tag}).status_code == 200


def test_odd_addresses_of_the_list_are_as_if_not_given(serve, root):
    add_run(root, "one")
    client = serve()
    for query in ("sort=name;drop", "page=99999999999", "page=-1", "page=²", "down=x", "q=%00%ff"):
        assert client.get(f"/rows?{query}").status_code == 200


def test_another_version_of_the_index_is_left_alone(serve, root, cache_dir, monkeypatch):
    """Two versions of stepscope may serve one folder."""
    add_run(root, "one")
    before = serve()
    (file,) = cache_dir.glob("serve/*/index-*.sqlite")
    inode = file.stat().st_ino
    monkeypatch.setattr("stepscope.ui.serve.listed_runs.VERSION", 999)
    assert list(rows(serve())) == ["one"]
    assert file.stat().st_ino == inode
    assert list(rows(before)) == ["one"]
