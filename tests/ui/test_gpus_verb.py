"""stepscope gpus: the table, the JSON, prices, and what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from stepscope.errors import StepscopeError
from stepscope.predict.compare_gpus import compare_gpus
from stepscope.predict.other_gpu.gpu import find_gpu
from stepscope.ui.api import open_bench
from stepscope.ui.cli.verbs import cli
from stepscope.ui.html.panes.gpus import gpus_view
from stepscope.ui.html.render import render_part


def run(*arguments: str) -> tuple[str, BaseException | None]:
    result = CliRunner().invoke(cli, ["gpus", *arguments])
    return result.stdout, result.exception


def test_the_json_has_every_gpu_the_shortest_step_first(golden: Path) -> None:
    text, error = run(str(golden / "h200-resnet18"), "--json")
    assert error is None
    body = json.loads(text)
    assert (body["schema"], body["source"]) == (1, "NVIDIA H200")
    steps = [row["step_ms"] for row in body["gpus"] if row["step_ms"] is not None]
    assert steps == sorted(steps)
    own = next(row for row in body["gpus"] if row["gpu"] == "H200-SXM-141GB")
    assert own["step_ms"] == pytest.approx(body["baseline_ms"])
    for row in body["gpus"]:
        assert set(row) >= {
            "gpu",
            "step_ms",
            "low_ms",
            "high_ms",
            "fits",
            "decides",
            "modelled_share",
        }
        if row["step_ms"] is not None:
            assert row["low_ms"] <= row["step_ms"] <= row["high_ms"]
            assert row["decides"] in ("device", "host")


def test_prices_give_samples_per_money(golden: Path, tmp_path: Path) -> None:
    """Half the price is twice the samples for it: samples/s x 3600 / price."""
    prices = tmp_path / "prices.csv"
    prices.write_text("gpu,price\nL4,0.5\nH100,2\n")
    text, _ = run(str(golden / "h200-resnet18"), "--json", "--prices", str(prices))
    rows = {row["gpu"]: row for row in json.loads(text)["gpus"]}
    l4 = rows["L4"]
    per_second = l4["samples_per_s"] or 1e3 / l4["step_ms"]
    assert l4["samples_per_money"] == pytest.approx(per_second * 3600 / 0.5)
    assert rows["H100-SXM5-80GB"]["price"] == 2
    assert rows["T4"]["price"] is None
    table, _ = run(str(golden / "h200-resnet18"), "--prices", str(prices), "--gpu", "L4")
    assert "per money" in table


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("L4", 3, "line 1"),
        ("L4,cheap", 3, "line 1"),
        ("", 3, "no prices"),
        ("L4,0", 2, "above 0"),
        ("L44,1", 2, "did you mean"),
        ('{"L4": "x"}', 3, "JSON object"),
    ],
)
def test_a_wrong_file_of_prices_is_named(
    golden: Path, tmp_path: Path, text: str, code: int, words: str
) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text(text)
    _, error = run(str(golden / "h200-resnet18"), "--prices", str(prices))
    assert isinstance(error, StepscopeError)
    assert error.exit_code == code
    assert words in str(error)


def test_a_trace_without_a_gpu_is_not_captured(golden: Path) -> None:
    _, error = run(str(golden / "cpu_step.json.gz"))
    assert isinstance(error, StepscopeError)
    assert error.exit_code == 4


def test_the_terminal_marks_the_gpu_of_the_trace(golden: Path) -> None:
    text, error = run(str(golden / "h200-resnet18"), "--gpu", "H200", "--gpu", "L4")
    assert error is None
    assert "H200-SXM-141GB (now)" in text
    assert "verdict" in text


def test_the_pane_draws_a_bar_for_every_gpu_inside_its_track(golden: Path) -> None:
    bench, _, _ = open_bench(str(golden / "h200-resnet18"), cache=False, quiet=True)
    comparison = compare_gpus(bench, [find_gpu("L4"), find_gpu("H200"), find_gpu("B200")])
    view = gpus_view(comparison)
    assert [row["name"] for row in view["rows"]] == [row.gpu for row in comparison.gpus]
    assert all(0 < row["bar"] <= 100 for row in view["rows"])
    assert max(row["low"] + row["width"] for row in view["rows"]) == pytest.approx(100)
    page = str(render_part("gpus.html.j2", view=view, alone=False))
    assert page.count("<tr") == 4
    assert "is-now" in page
