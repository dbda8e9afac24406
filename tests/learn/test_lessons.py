"""Every command of the course runs, and what the answers claim holds on this machine.

Only claims that cannot depend on a machine's speed or load are checked: bytes and FLOPs exactly,
which part is the largest, what shrinks, what adds up.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).parent.parent.parent
COURSE = REPO / "docs/learn"
PAGES = sorted(COURSE.glob("[0-9]-*.md"))
# A command may wait for others on a busy machine; alone, each lesson takes 10 to 30 s.
PATIENCE_S = 400


def commands(page: Path) -> list[str]:
    """The blocks that a reader types, in order."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in blocks]


class Lesson:
    """A copy of the course in which one page's commands were run from first to last."""

    def __init__(self, number: int, scratch: Path) -> None:
        (self.page,) = COURSE.glob(f"{number}-*.md")
        self.folder = scratch / "docs/learn"
        shutil.copytree(COURSE / "scripts", self.folder / "scripts")
        (scratch / "tests").mkdir()
        (scratch / "tests/golden").symlink_to(REPO / "tests/golden")
        script = "set -eo pipefail\n" + "\n".join(commands(self.page))
        done = self._call(["bash", "-c", script])
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        self.output = done.stdout

    def answer(self, *arguments: str) -> Any:
        """The JSON answer of one more command of stepscope."""
        done = self._call(["stepscope", *arguments, "--json"])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def losses(self) -> tuple[list[str], list[str]]:
        """What the script printed in the first and in the second of two runs."""
        printed = re.findall(r"^step \d+: loss (\S+)", self.output, re.MULTILINE)
        half = len(printed) // 2
        return printed[:half], printed[half:]

    def _call(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )


def parts(answer: dict[str, Any]) -> dict[str, float]:
    """The budget of a step, in milliseconds; it adds up."""
    budget = answer["budget"]
    assert sum(part["ms"] for part in budget["parts"]) == pytest.approx(budget["step_ms"])
    assert sum(part["share"] for part in budget["parts"]) == pytest.approx(1)
    return {part["id"]: part["ms"] for part in budget["parts"]}


def says(page: Path, number: int) -> None:
    """The page gives this number to its readers."""
    assert f"{number:,}" in page.read_text()


@pytest.mark.slow
def test_lesson_1_python_shrinks_and_flops_are_those_by_hand(tmp_path: Path) -> None:
    lesson = Lesson(1, tmp_path)
    before = lesson.answer("explain", "runs/where/before")
    after = lesson.answer("explain", "runs/where/after")
    told = parts(before)
    assert max(told, key=told.__getitem__) == "python"
    assert parts(after)["python"] < told["python"] / 2

    findings = lesson.answer("explain", "runs/where/lines")["findings"]
    lines = {line["function"] for finding in findings for line in finding["where"]}
    assert "edit_distance" in lines

    layers, width, tokens, words, batch = 2, 64, 128, 32, 4
    weights = layers * 12 * width * width + width * words
    per_token = 6 * weights + 12 * layers * width * tokens
    for answer in (before, after):
        efficiency = answer["ranks"][0]["efficiency"]
        assert efficiency["model_flops"] == per_token * batch * tokens
        if efficiency["mfu"] is not None:
            seconds = efficiency["step_ms"] / 1e3
            by_hand = efficiency["model_flops"] / (seconds * efficiency["peak_flops"])
            assert efficiency["mfu"] == pytest.approx(by_hand)
    for number in (weights, per_token, per_token * batch * tokens):
        says(lesson.page, number)

    compared = lesson.answer("compare", "runs/where/before", "runs/where/after")
    assert compared["change"] < 0
    moved = {part["id"]: part["change_ms"] for part in compared["budget"]}
    assert min(moved, key=moved.__getitem__) == "python"


@pytest.mark.slow
def test_lesson_2_the_wait_for_data_goes_and_losses_stay(tmp_path: Path) -> None:
    lesson = Lesson(2, tmp_path)
    before = lesson.answer("explain", "runs/feed/before")
    told, then = parts(before), parts(lesson.answer("explain", "runs/feed/after"))
    assert told["data_loading"] > 0.3 * before["budget"]["step_ms"]
    assert told["data_loading"] >= 8 * 8 * 0.9  # eight samples of 8 ms; sleeps only get longer
    assert then["data_loading"] < told["data_loading"] / 2
    assert "data-loading" in {finding["id"] for finding in before["findings"]}

    promised = lesson.answer("whatif", "runs/feed/before", "--set", "no-data-wait")
    assert promised["verdict"] == "faster"
    compared = lesson.answer("compare", "runs/feed/before", "runs/feed/after")
    assert compared["verdict"] == "faster"
    moved = {part["id"]: part["change_ms"] for part in compared["budget"]}
    assert min(moved, key=moved.__getitem__) == "data_loading"

    one, four = lesson.losses()
    assert one == four
    assert len(one) == 3


@pytest.mark.slow
def test_lesson_3_the_same_flops_in_fewer_operators(tmp_path: Path) -> None:
    lesson = Lesson(3, tmp_path)
    before = lesson.answer("explain", "runs/small/before")
    after = lesson.answer("explain", "runs/small/after")
    told = parts(before)
    assert told["compute"] + told["python"] > 0.8 * sum(told.values())
    (one,), (other,) = before["ranks"], after["ranks"]
    # 64 products of 4 x 16 and 16 x 16, 2 FLOPs each, forward and for the weights' gradients
    assert one["efficiency"]["model_flops"] == 64 * 2 * (2 * 4 * 16 * 16)
    assert other["efficiency"]["model_flops"] == one["efficiency"]["model_flops"]
    says(lesson.page, one["efficiency"]["model_flops"])
    # On some processors torch makes a batched product of single ones, which are events too.
    assert other["events"] < one["events"] / 2
    assert lesson.answer("compare", "runs/small/before", "runs/small/after")["verdict"] == "faster"
    loop, batched = lesson.losses()
    assert loop == batched
    assert len(loop) == 4

    golden = "../../tests/golden"
    small = lesson.answer("whatif", f"{golden}/cuda_step.json.gz", "--set", "cuda-graphs")
    large = lesson.answer("whatif", f"{golden}/h200-resnet18", "--set", "cuda-graphs")
    assert small["baseline_host_ms"] > small["baseline_device_ms"]
    assert (small["verdict"], small["decides"]) == ("faster", "device")
    assert large["baseline_host_ms"] < large["baseline_device_ms"]
    assert large["verdict"] == "no difference"


@pytest.mark.slow
def test_lesson_4_bytes_by_hand_to_the_byte(tmp_path: Path) -> None:
    lesson = Lesson(4, tmp_path)
    run = lesson.answer("explain", "runs/memory/before", "--memory-limit", "100MB")
    memory = run["ranks"][0]["memory"]
    blocks, width, batch = 6, 128, 512
    parameters = blocks * (width * 4 * width + 4 * width + 4 * width * width + width)
    tensors = blocks * 4
    kept = blocks * (batch * width + 2 * batch * 4 * width) * 4
    fixed = 4 * parameters + (8 * parameters + 4 * tensors)
    categories = memory["categories"]
    assert categories["parameters"] == 4 * parameters
    assert categories["optimizer"] == 8 * parameters + 4 * tensors
    assert categories["activations"] == kept
    assert (categories["gradients"], memory["phase"]) == (0, "forward")
    assert memory["peak_bytes"] == fixed + kept
    sample = kept // batch
    assert memory["largest_batch"]["largest"] == int((98_000_000 - fixed) / sample)
    double = lesson.answer("explain", "runs/memory/double")["ranks"][0]["memory"]["peak_bytes"]
    assert double == fixed + 1024 * sample
    ours = (parameters, 4 * parameters, 8 * parameters + 96, kept, sample, fixed, double)
    for number in (*ours, memory["largest_batch"]["largest"]):
        says(lesson.page, number)

    before = lesson.answer("explain", "runs/memory/before.json.gz")["ranks"][0]
    after = lesson.answer("explain", "runs/memory/after.json.gz")["ranks"][0]
    assert after["memory"]["peak_bytes"] < before["memory"]["peak_bytes"] / 2
    twice = after["efficiency"]
    assert twice["model_flops"] == before["efficiency"]["model_flops"]
    assert twice["hardware_flops"] / twice["model_flops"] == pytest.approx(4 / 3, rel=0.02)


@pytest.mark.slow
def test_lesson_5_the_straggler_is_named_and_buckets_overlap(tmp_path: Path) -> None:
    lesson = Lesson(5, tmp_path)
    slow = lesson.answer("explain", "runs/two/slow")
    # where other processes slow both ranks by chance, "not resolved" is the right answer
    assert slow["stragglers"]["verdict"] in ("found", "not resolved")
    assert {late["rank"] for late in slow["stragglers"]["ranks"]} <= {1}
    assert slow["arrivals"][0]["rank"] == 1
    own = [
        statistics.median(column) for column in zip(*slow["steps_by_rank"]["own_ns"], strict=True)
    ]
    assert own[0] < own[1]
    compared = lesson.answer("compare", "runs/two/slow", "runs/two/even")
    assert compared["change"] < 0

    even, buckets = (lesson.answer("explain", f"runs/two/{run}") for run in ("even", "buckets"))
    assert parts(even)["exposed_comm"] > 0
    layer = (768 * 768 + 768) * 4
    (whole,), (single,) = even["collectives"], buckets["collectives"]
    assert (whole["size_bytes"], single["size_bytes"]) == (6 * layer, layer)
    assert single["count"] == 6 * whole["count"]
    says(lesson.page, 6 * layer)
    assert _overlap(even) < _overlap(buckets)
    # the bound of question 3, reached by one value that stands alone
    for ranks in (2, 5):
        alone = [0.0] * (ranks - 1) + [1.0]
        score = (1 - statistics.mean(alone)) / statistics.stdev(alone)
        assert score == pytest.approx((ranks - 1) / math.sqrt(ranks))
        assert score < 2


def _overlap(answer: dict[str, Any]) -> float:
    return statistics.mean(rank["overlap"] for rank in answer["ranks"])


@pytest.mark.slow
def test_lesson_6_two_points_make_the_line_and_workers_are_predicted(tmp_path: Path) -> None:
    lesson = Lesson(6, tmp_path)
    ((small, large, alpha_us, beta_ns),) = re.findall(
        r"4096 bytes take (\d+) us, 8388608 bytes (\d+) us\nalpha (-?\d+) us, beta (\S+) ns",
        lesson.output,
    )
    assert int(small) < int(large)
    alpha, beta = _line(int(small), int(large))
    assert float(alpha_us) == pytest.approx(alpha, abs=2)
    assert float(beta_ns) == pytest.approx(beta, abs=0.002)
    alpha, beta = _line(336, 6458)  # the page's own numbers
    assert (round(alpha), round(beta, 3)) == (333, 0.730)
    assert round((alpha + 14_174_208 * beta / 1e3) / 1e3, 1) == 10.7

    weak, strong = (
        lesson.answer("whatif", "runs/scale/one", "--set", f"workers=8{how}")
        for how in ("", ":strong")
    )
    assert weak["predicted_ms"] > weak["baseline_ms"]
    assert strong["predicted_ms"] < weak["predicted_ms"]
    assert strong["throughput_factor"] < weak["throughput_factor"] < 8
    compared = lesson.answer("compare", "runs/scale/one", "runs/scale/two")
    came = {part["id"]: (part["a_ms"], part["b_ms"]) for part in compared["budget"]}
    assert came["exposed_comm"][0] == 0
    assert came["exposed_comm"][1] > 0


def _line(small_us: float, large_us: float) -> tuple[float, float]:
    """alpha in µs and beta in ns a byte, through the two sizes of scripts/allreduce.py."""
    beta_us = (large_us - small_us) / (8_388_608 - 4_096)
    return small_us - 4_096 * beta_us, beta_us * 1e3


@pytest.mark.slow
def test_lesson_7_the_interval_by_hand_and_the_promise_answered(tmp_path: Path) -> None:
    lesson = Lesson(7, tmp_path)
    compared = lesson.answer("compare", "runs/proof/ab", "--no-prediction")
    ratios = [
        math.log(b["mean_ms"] / a["mean_ms"])
        for a, b in zip(compared["a"]["runs"], compared["b"]["runs"], strict=True)
    ]
    assert len(ratios) == 3
    middle = statistics.mean(ratios)
    reach = 4.303 * statistics.stdev(ratios) / math.sqrt(3)
    near = 0.005
    assert math.log1p(compared["change"]) == pytest.approx(middle, abs=near)
    assert math.log1p(compared["low"]) == pytest.approx(middle - reach, abs=near)
    assert math.log1p(compared["high"]) == pytest.approx(middle + reach, abs=near)
    zero_inside = compared["low"] <= 0 <= compared["high"]
    assert (compared["verdict"] == "no difference seen") == zero_inside
    phases = {phase["id"]: phase for phase in compared["phases"]}
    assert phases["optimizer"]["b_ms"] < phases["optimizer"]["a_ms"] / 2

    record = lesson.answer("whatif", "--history")
    (promise,) = record["promises"]
    assert promise["settings"] == [{"name": "optimizer", "value": "fused"}]
    assert promise["predicted_ms"] < promise["baseline_ms"]
    if promise["delivery"] is None:
        assert "stays open: the change is only known to lie between" in " ".join(
            lesson.output.split()
        )
        return
    delivered = promise["baseline_ms"] * (1 + promise["delivery"]["change"])
    assert promise["delivered_ms"] == pytest.approx(delivered)
    assert promise["error"] == pytest.approx(delivered / promise["predicted_ms"] - 1)


def test_the_index_names_every_lesson_and_pages_keep_their_shape() -> None:
    index = (COURSE / "README.md").read_text()
    assert [page.name[0] for page in PAGES] == list("1234567")
    for page in PAGES:
        text = page.read_text()
        assert f"]({page.name})" in index
        assert text.startswith(f"# {page.name[0]} ")
        for needed in ("**Symptom.**", "## Run this", "## What you see", "## Questions"):
            assert needed in text, f"{page.name}: {needed}"
        for needed in ("<details><summary>Answer", "roof", "Further reading: "):
            assert needed in text, f"{page.name}: {needed}"
        assert len(text.splitlines()) <= 120


def test_scripts_are_short_and_each_is_used() -> None:
    used = "".join(page.read_text() for page in PAGES)
    for script in (COURSE / "scripts").glob("*.py"):
        assert f"scripts/{script.name}" in used
        assert len(script.read_text().splitlines()) <= 80
