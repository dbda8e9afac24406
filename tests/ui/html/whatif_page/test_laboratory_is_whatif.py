"""Every number of the page "What if" is the one that its printed command gives."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from click.testing import CliRunner
from whatif_pages import GOLDEN, lay_out_slowest

from few_variants import is_one_of
from stepscope.errors import NotCapturedError
from stepscope.text.figures import milliseconds, significant, size
from stepscope.ui.cli.verbs import cli
from stepscope.ui.html.whatif_grid import WhatIfGrid, settings_at

RUNS = ("cpu-ddp-slow-rank", "cpu-two-ranks", "cpu_step.json.gz", "h200-resnet18")
_READ = """(wanted) => {
  const { whatif } = window.stepscope;
  whatif.set(wanted);
  const text = (name) => whatif.root.querySelector(`[data-out="${name}"]`)?.textContent;
  return ["step", "interval", "peak", "command"].map(text);
}"""


def positions(grid: WhatIfGrid) -> list[tuple[str, ...]]:
    """The settings of every predicted position: what each control does alone comes first."""
    axes = (*grid.axes, *grid.scaling_axes)
    asked = [tuple(map(str, settings_at(axes, places))) for places in grid.positions]
    return sorted((settings for settings in asked if settings), key=len)


def run_printed(command: str) -> tuple[str, str, str] | None:
    """What the printed command says: step, interval and peak; None if a change refuses."""
    answer = CliRunner().invoke(cli, [*shlex.split(command)[1:], "--json"])
    if isinstance(answer.exception, NotCapturedError):
        return None
    body = json.loads(answer.stdout)
    if body["refused"]:
        return None
    between = f"between {significant(body['low_ms'])} and {significant(body['high_ms'])} with 95%"
    peak = "not known" if body["peak_bytes"] is None else size(body["peak_bytes"])
    return milliseconds(body["predicted_ms"]), between, peak


@pytest.mark.browser
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RUNS)
def test_each_position_shows_what_its_command_prints(
    name: str, every: bool, open_page: Any
) -> None:
    explanation, grid = lay_out_slowest(GOLDEN / name)
    page = open_page(explanation, grid)
    wanted = positions(grid)
    assert len(wanted) > 5
    for number, settings in enumerate(wanted, start=1):
        if not every and not is_one_of(12, number, len(wanted)):
            continue
        step, interval, peak, command = page.evaluate(_READ, list(settings))
        arguments = shlex.split(command)
        assert [arguments[i + 1] for i, word in enumerate(arguments) if word == "--set"] == [
            *settings
        ]
        expected = run_printed(command)
        if expected is None:
            assert step == "Not known"
            continue
        assert (step, interval.partition("a step, ")[2]) == expected[:2], settings
        assert peak in (None, expected[2]), settings


@pytest.mark.browser
def test_a_position_that_was_not_predicted_shows_its_command_alone(open_page: Any) -> None:
    explanation, grid = lay_out_slowest(GOLDEN / "cpu-ddp-slow-rank")
    page = open_page(explanation, grid)
    wanted = ["batch=x4", "optimizer=fused", "workers=64:strong", "bandwidth=2", "bucket-mb=1"]
    assert tuple(wanted) not in positions(grid)
    step, interval, _, command = page.evaluate(_READ, wanted)
    assert step == "—"
    assert "the command below" in interval
    assert all(f"--set {setting}" in command for setting in wanted)
    assert not any(character.isdigit() for character in interval)
    # A curve is drawn as a whole or not at all.
    assert page.locator('[data-out="buckets"]').inner_text().startswith("Not predicted")
    assert page.locator('[data-out="strong"] .dot').count() == 0


@pytest.mark.parametrize("name", RUNS)
def test_no_faster_link_makes_a_step_longer(name: str) -> None:
    _, grid = lay_out_slowest(GOLDEN / name)
    steps = dict(zip(grid.positions, grid.cells["step"], strict=True))
    at = len(grid.axes) + [axis.id for axis in grid.scaling_axes].index("bandwidth")
    for places, step in steps.items():
        faster = steps.get((*places[:at], places[at] + 1, *places[at + 1 :]))
        assert faster is None or step is None or faster <= step * (1 + 1e-9)


def test_workers_and_links_of_a_job_on_cpus_are_controls() -> None:
    _, grid = lay_out_slowest(GOLDEN / "cpu-ddp-slow-rank")
    alone = {settings[0] for settings in positions(grid) if len(settings) == 1}
    assert {"workers=1", "workers=64:strong", "bandwidth=0.25", "bandwidth=4"} <= alone
    assert {"bucket-mb=1", "batch=x2"} <= alone
