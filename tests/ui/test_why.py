"""`stepscope why`: pages about findings in the terminal, near names, a list."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stepscope.explain.findings import FINDINGS, load_rules
from stepscope.text.words import SITE
from stepscope.ui.cli import why as finding_pages
from stepscope.ui.cli.verbs import cli
from stepscope.ui.cli.why import finding_ids, list_findings, near_findings, read_page

DOCS = Path(__file__).parents[2] / "docs"
RULES = [rule for scope in FINDINGS for rule in load_rules(scope)]


def why(*words: str) -> Result:
    return CliRunner().invoke(cli, ["why", *words])


def test_every_finding_has_a_page_here_and_a_line_in_the_list() -> None:
    assert set(finding_ids()) == {rule.id for rule in RULES}
    rows = list_findings()
    assert sorted(row.id for row in rows) == [*finding_ids()]
    assert all(row.summary for row in rows)
    shown = why().output
    for row in rows:
        assert f"  {row.id} " in shown
        assert row.summary in shown


@pytest.mark.parametrize("finding", finding_ids())
def test_a_page_is_printed_with_links_to_the_site(finding: str) -> None:
    done = why(finding)
    assert done.exit_code == 0, done.output
    page = (DOCS / f"findings/{finding}.md").read_text()
    for line in page.splitlines():
        if "](" not in line:
            assert line in done.output
    for target in re.findall(r"\]\(([^)]+)\)", read_page(finding).text):
        assert target.startswith(("http", "`")), target
    assert f"{SITE}/findings/{finding}/" in done.output


def test_links_lead_to_the_page_on_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = (
        "# a-finding\n[b](b.md) [w](../reference/changes.md#x-y) [all](README.md) [l](../learn/)\n"
        "[here](#below) [out](https://example.org/x.md)\n```\ntext[0](b.md)\n```\n[c](../README.md)\n"
    )
    monkeypatch.setattr(finding_pages, "_raw", lambda _: raw)
    assert read_page("a-finding").text == (
        f"# a-finding\n[b]({SITE}/findings/b/) [w]({SITE}/reference/changes/#x-y) "
        f"[all]({SITE}/findings/) [l]({SITE}/learn/)\n"
        f"[here]({SITE}/findings/a-finding/#below) [out](https://example.org/x.md)\n"
        f"```\ntext[0](b.md)\n```\n[c]({SITE}/)\n"
    )


def test_json_is_one_object() -> None:
    body = json.loads(why("data-loading", "--json").output)
    assert {name: body[name] for name in ("schema", "id", "url")} == {
        "schema": 1,
        "id": "data-loading",
        "url": f"{SITE}/findings/data-loading/",
    }
    assert body["text"].startswith(f"# {body['title']}\n")
    listed = json.loads(why("--json").output)
    assert listed["schema"] == 1
    assert {row["id"] for row in listed["findings"]} == set(finding_ids())


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["host-bond"], "host-bound"),
        (["stragler"], "straggler"),
        (["waiting", "for", "data"], "data-loading"),
        (["memory leak"], "memory-leak"),
        (["fp32"], "fp32-matmuls"),
    ],
)
def test_near_names_and_words_suggest_findings(words: list[str], meant: str) -> None:
    done = why(*words)
    if done.exit_code == 0:  # words that make up an id
        assert meant in done.output
        return
    assert done.exception is not None
    assert meant in str(done.exception)
    assert "Did you mean" in str(done.exception)


def test_nonsense_suggests_the_list() -> None:
    assert near_findings(["xyzzy"]) == []
    assert "`stepscope why` lists all findings" in str(why("xyzzy").exception)


def test_a_change_is_explained_with_its_commands() -> None:
    shown = why("compile").output
    assert "stepscope whatif RUN --set compile" in shown
    assert "stepscope tune --only compile -- python train.py" in shown
    assert json.loads(why("compile", "--json").output)["id"] == "compile"


@pytest.mark.parametrize(
    ("name", "setting", "fix"),
    [
        ("bf16", "precision=bf16", "bf16"),
        ("precision=bf16", "precision=bf16", "bf16"),
        ("optimizer=fused", "optimizer=fused", "fused-optimizer"),
        ("reduce-overhead", "compile=reduce-overhead", "compile=reduce-overhead"),
        ("one-thread", "threads=1", "one-thread"),
        ("batch", "batch=x2", None),
        ("no-stalls", "no-stalls", None),
    ],
)
def test_a_change_has_the_spelling_of_each_command(
    name: str, setting: str, fix: str | None
) -> None:
    lines = why(name).output.splitlines()
    assert f"Predict it: stepscope whatif RUN --set {setting}" in lines
    measured = [line for line in lines if line.startswith("Measure it")]
    wanted = [f"Measure it: stepscope tune --only {fix} -- python train.py"] if fix else []
    assert measured == wanted


def test_a_terminal_gets_formatted_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    shown = why("data-loading").output
    assert "stepscope" in shown
    assert "```" not in shown


def test_pages_of_an_installed_package_are_read_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "pages/findings"
    shipped.mkdir(parents=True)
    (shipped / "healthy.md").write_text("# healthy\nshipped\n")
    monkeypatch.setattr(finding_pages, "__file__", str(tmp_path / "cli/why.py"))
    for cached in (finding_pages._folder, finding_pages._raw):
        cached.cache_clear()
    try:
        assert finding_ids() == ("healthy",)
        assert read_page("healthy").text == "# healthy\nshipped\n"
    finally:
        monkeypatch.undo()
        for cached in (finding_pages._folder, finding_pages._raw):
            cached.cache_clear()
