"""The example notebook runs as it stands, and its kept outputs are small, safe and local."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepscope.ui.cli import ab, explain, run

DOCS = Path(__file__).parent.parent.parent / "docs"
NOTEBOOK = DOCS / "notebook.ipynb"


def _html(cells: list[dict[str, Any]]) -> list[str]:
    return [
        "".join(output["data"]["text/html"])
        for cell in cells
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", {})
    ]


def test_the_kept_outputs_are_cards_without_requests_or_paths_of_a_machine() -> None:
    text = NOTEBOOK.read_text()
    assert len(text) < 40_000
    cells = json.loads(text)["cells"]
    cards = _html(cells)
    assert len(cards) == 4
    for card in cards:
        for forbidden in ("<script", "<img", "http", "url(", "src="):
            assert forbidden not in card
    assert not any(
        output.get("output_type") == "error" for c in cells for output in c.get("outputs", ())
    )
    assert "/home/" not in text
    assert "/tmp/" not in text
    assert "/work/" not in text


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    kept = _html(notebook.cells)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=place).execute()
    cards = _html(notebook.cells)
    assert len(cards) == len(kept)
    assert cards != kept  # measured anew
    assert "Waiting for data" in cards[0]
    assert "no-data-wait" in cards[1]
    assert "B against A" in cards[3]
    assert (tmp_path / "before/rank-00000/trace.json.gz").exists()


def test_the_commands_of_the_example_action_are_ours() -> None:
    action = yaml.safe_load((DOCS / "examples/script-action.yml").read_text())
    steps = {step.get("name", ""): step.get("run", "") for step in action["jobs"]["step"]["steps"]}
    compared = shlex.split(steps["Compare the base with the change"].partition("stepscope ab ")[2])
    with ab.command.make_context("ab", compared) as context:
        assert context.params["fail_on_slower"] == 0.03
        assert "---" in context.params["commands"]
    first, second = steps["Explain the change"].strip().splitlines()
    with run.command.make_context(
        "run", shlex.split(first.partition("stepscope run ")[2])
    ) as context:
        assert context.params["out"] == Path("explained")
    words = second.partition("stepscope explain ")[2].partition(";")[0]
    with explain.command.make_context("explain", shlex.split(words)) as context:
        assert context.params["perfetto"] == Path("trace.json.gz")
