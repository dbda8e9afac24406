"""What each page shows: report, comparison, what-ifs, tune, trends, track record."""

from __future__ import annotations

import re
import shutil

from live_runs import BEGAN_S, alive, make_rows, write_rank, write_run, write_steps
from served_folders import add_run, add_tune

MARKUP = "<img src=x onerror=alert(1)>"


def ids(client):
    return {row["name"]: row["id"] for row in client.get("/runs.json").json()["runs"]}


def test_the_report_is_the_one_that_explain_writes(serve, root, tmp_path):
    from stepscope import write_report

    folder = add_run(root, "one", trace=True)
    client = serve()
    page = client.get(f"/runs/{ids(client)['one']}")
    assert f'src="/runs/{ids(client)["one"]}/report"' in page.text
    report = client.get(f"/runs/{ids(client)['one']}/report")
    write_report(folder, tmp_path / "report.html")
    assert report.text == (tmp_path / "report.html").read_text()


def test_a_report_is_made_again_when_the_run_has_changed(serve, root):
    folder = add_run(root, "one", step_ms=10.0, trace=True)
    client = serve()
    run = ids(client)["one"]
    first = client.get(f"/runs/{run}/report").text
    assert client.get(f"/runs/{run}/report").text == first
    write_steps(folder / "rank-00000", make_rows([50.0] * 40))
    client.served.keeper.look()
    assert client.get(f"/runs/{run}/report").text != first


def test_a_cache_that_was_cleaned_is_filled_again(serve, root):
    add_run(root, "one", trace=True)
    client = serve()
    shutil.rmtree(client.served.pages)
    assert client.get(f"/runs/{ids(client)['one']}/report").status_code == 200


def test_a_report_in_the_folder_is_never_served(serve, root):
    folder = add_run(root, "one", trace=True)
    text = f"<title>{MARKUP}says &lt;b&gt; · stepscope</title><script>alert(1)</script>"
    (folder / "report.html").write_text(text)
    client = serve()
    row = client.get("/runs.json").json()["runs"][0]
    assert row["verdict"] == f"{MARKUP}says <b>"
    for path in ("/", f"/runs/{row['id']}", f"/runs/{row['id']}/report"):
        answer = client.get(path).text
        assert "<img" not in answer
        assert "alert(1)</script>" not in answer


def test_a_run_that_goes_on_has_a_place_for_what_is_live(serve, root):
    write_run(root / "now", process=alive())
    write_rank(root / "now" / "rank-00000", process=alive())
    write_steps(root / "now" / "rank-00000", make_rows([10.0] * 30))
    client = serve()
    run = ids(client)["now"]
    page = client.get(f"/runs/{run}").text
    assert f'<section id="live" data-run="{run}"' in page
    assert "<iframe" not in page


def test_two_ticked_runs_are_compared_the_older_one_first(serve, root):
    add_run(root, "new", step_ms=12.0, started_unix=BEGAN_S + 100)
    add_run(root, "old", step_ms=10.0, started_unix=BEGAN_S)
    client = serve()
    new, old = ids(client)["new"], ids(client)["old"]
    page = client.get("/compare", params={"run": [new, old]}).text
    assert f"/compare/page?a={old}&amp;b={new}" in page
    assert f"/compare?a={new}&amp;b={old}" in page
    comparison = client.get("/compare/page", params={"a": old, "b": new}).text
    assert "slower" in re.search("<title>(.*?)</title>", comparison)[1]
    for query in ({}, {"run": [new]}, {"run": [new, new]}, {"run": [new, old, old]}):
        assert client.get("/compare", params=query).status_code == 400


def test_looking_at_a_comparison_answers_no_promise(serve, root, tmp_path, monkeypatch):
    for name, step_ms in (("a", 10.0), ("b", 12.0)):
        add_run(root, name, step_ms=step_ms)
    client = serve()
    pair = {"a": ids(client)["a"], "b": ids(client)["b"]}
    assert client.get("/compare/page", params=pair).status_code == 200
    assert not (tmp_path / "stepscope-record").exists()


def test_changes_are_predicted_alone_or_together(serve, root):
    from stepscope import whatif

    folder = add_run(root, "one", trace=True)
    client = serve()
    path = f"/runs/{ids(client)['one']}"
    assert "precision" in client.get(f"{path}/whatif").text
    usual = client.get(f"{path}/predictions")
    assert usual.status_code == 200
    changes = {"change": ["scale", ""], "value": ["mm:0.5", ""]}
    one = client.get(f"{path}/predictions", params=changes, headers={"accept": "application/json"})
    assert one.status_code == 200, one.text
    assert one.json()[0]["predicted_ms"] == whatif(folder, "scale=mm:0.5").predicted_ms


def test_a_change_that_cannot_be_made_is_a_sentence_without_markup(serve, root):
    add_run(root, "one", trace=True)
    add_run(root, "bare")
    client = serve()
    for name, change in (("one", MARKUP), ("one", "batch"), ("bare", "precision")):
        query = {"change": change, "value": MARKUP}
        answer = client.get(f"/runs/{ids(client)[name]}/predictions", params=query)
        assert answer.status_code in (400, 422)
        assert "<img" not in answer.text
        shown = {"sec-fetch-dest": "empty"}
        path = f"/runs/{ids(client)[name]}/predictions"
        assert client.get(path, params=query, headers=shown).status_code == 200
        page = client.get(f"/runs/{ids(client)[name]}/whatif", params=query).text
        assert "<img" not in page


def test_a_tune_shows_its_trials(serve, root):
    add_tune(root, "tuned")
    client = serve()
    report = client.get(f"/runs/{ids(client)['tuned']}/report")
    assert "fused-optimizer" in report.text
    assert "frame-ancestors 'self'" in report.headers["content-security-policy"]


def test_trials_of_a_tune_that_goes_on_are_not_listed(serve, root):
    add_run(root, "tuned/baseline")
    add_run(root, "tuned/trials/0001-baseline")
    add_run(root, "trials/mine")
    (root / "tuned" / "journal.jsonl").write_text("{}\n")
    assert set(ids(serve())) == {"tuned/baseline", "trials/mine"}


def test_what_cannot_be_read_is_said_in_the_frame(serve, root):
    add_run(root, "bare")
    client = serve()
    path = f"/runs/{ids(client)['bare']}/report"
    assert client.get(path).status_code == 422
    answer = client.get(path, headers={"sec-fetch-dest": "iframe"})
    assert answer.status_code == 200
    assert "no trace" in answer.text
    assert "frame-ancestors 'self'" in answer.headers["content-security-policy"]


def test_a_script_has_one_series_for_each_device_and_number_of_ranks(serve, root):
    for number in range(16):
        step_ms = (10.0 if number < 9 else 13.0) + 0.01 * (7 * number % 5)
        add_run(root, f"run-{number:02}", step_ms=step_ms, started_unix=BEGAN_S + 60 * number)
    add_run(root, "two ranks", world_size=2)
    client = serve()
    listed = client.get("/trends").text
    series = [
        target.replace("&amp;", "&") for target in re.findall(r'href="(/trends\?[^"]*)"', listed)
    ]
    assert len(series) == 2
    page = client.get(series[0]).text
    assert "30% longer since run 10 of 16" in page
    assert f"/runs/{ids(client)['run-09']}" in page
    assert f"a={ids(client)['run-08']}&amp;b={ids(client)['run-09']}" in page
    assert "1 run. Finding a change needs" in client.get(series[1]).text
    assert client.get("/trends", params={"script": MARKUP, "ranks": "²"}).status_code == 400


def test_the_track_record_is_that_of_the_command(serve, root):
    from stepscope.ui.topics.comparison import record_answer

    page = serve().get("/record").text
    assert record_answer(()).verdict.rstrip(".") in page
