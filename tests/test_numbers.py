"""docs/numbers.md has an entry for every number, and leads to the code that computes it."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from stepscope.explain.explain_job import explain_job
from stepscope.explain.whole_run.live import explain_live
from stepscope.trace.follow_run import RunFollower
from stepscope.ui.contract import explanation_json
from stepscope.ui.live_json import live_json

ROOT = Path(__file__).parent.parent
NUMBERS = (ROOT / "docs/numbers.md").read_text()
GOLDEN = ROOT / "tests/golden"

# Names in docs/json.md that hold no number: words, places, switches, and what holds other names.
NO_NUMBERS = set(
    re.findall(
        r"\w+",
        """
    also collecting exception failed generating headline signal without_gradients
    a_path above aligned assumptions at at_end b b_path backend baseline_from batch_from below
    beside bound bytes_source category cause changed comparison config contention decides
    delivery description detail device doubt dtype dtypes evidence explain fastest file finding fits
    flops_source folder formula function group help hosts id ignored kind label limit_from
    line looked_at model module moment name named next not_offered notes open_promises
    operator paired path paths peak_source phase points predicted_from profile promises recomputed
    reference refused saved
    schema script seen sentence several stall_ setting settings severity shapes signature source
    sources
    steady step steps_are steps_from summary title torch tried verdict whatifs when_unix where
    why words workload world_size
    command earlier status ptp_devices synchronised
    from link rack reach scope switch to
    allocator build collective compile data first_batch gc imports inputs logging memory_growth
    operating_system process_group times trend
    not_run by_hand control outcome parity parity_detail patch remedy trials try tune variables
    agrees broken_rules cuda differs interleaved machine processor reruns rules samples scaling
    algorithm algorithms groups laboratory pool
    sizes stepscope tags target_reached task workloads
    problem state
    backward captured compiled eager first gave_up guard guards hint key not_graphed place reason
    region second
    library mode modes operators place places software traced_place unprobed
    always by compression queued shard staleness straggling worker workers
    gpu gpus source_gpu
    action target value
    """,
    )
)
# Positions, not measurements: they say which one is meant.
POSITIONS = {"rank", "line", "schema", "index", "late_rank", "step", "reference", "world_size"}


def entries() -> set[str]:
    """Every name that numbers.md has in backticks, path by path and part by part."""
    names = re.findall(r"`([\w.\[\]]+)`", NUMBERS)
    return {part.removesuffix("[]") for name in names for part in name.split(".")}


def test_every_function_named_in_numbers_md_exists() -> None:
    named = sorted(set(re.findall(r"`(stepscope(?:\.\w+)+):(\w+(?:\.\w+)*)`", NUMBERS)))
    assert len(named) > 80
    broken = [f"{module}:{name}" for module, name in named if not exists(module, name)]
    assert not broken, "docs/numbers.md names functions that are gone:\n" + "\n".join(broken)


def exists(module: str, name: str) -> bool:
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError):
        return False
    return True


def test_every_python_name_in_the_docs_exists() -> None:
    """`stepscope.a.b` in backticks, and what examples import."""
    broken = []
    for page in ROOT.glob("docs/**/*.md"):
        text = page.read_text()
        names = {f"stepscope.{name}" for name in re.findall(r"`stepscope\.([\w.]*\w)[(`]", text)}
        for module, imported in re.findall(r"^from (stepscope[\w.]*) import (.+)$", text, re.M):
            names |= {f"{module}.{name}" for name in re.split(r", *", imported)}
        broken += [f"{page.name}: {name}" for name in names if not any_split_exists(name)]
    assert not broken, "docs name what does not exist:\n" + "\n".join(sorted(broken))


def any_split_exists(name: str) -> bool:
    """Whether some part of the dotted name is a module, and the rest is in it."""
    parts = name.split(".")
    if any(
        exists(".".join(parts[:place]), ".".join(parts[place:])) for place in range(1, len(parts))
    ):
        return True
    return exists(name, "__name__")


def test_every_row_of_numbers_md_names_a_function() -> None:
    rows = [line for line in NUMBERS.splitlines() if line.startswith("| ")]
    assert [row for row in rows if "`stepscope." not in row and "computed by" not in row] == []


def test_every_number_in_json_md_has_an_entry() -> None:
    text = (ROOT / "docs/json.md").read_text().split("## Exit codes")[0]
    names = re.findall(r"`(\.?\w+(?:\[\])?(?:\.\w+(?:\[\])?)*)`", text)
    parts = {part.removesuffix("[]") for name in names for part in name.strip(".").split(".")}
    missing = parts - entries() - NO_NUMBERS
    assert not missing, f"no entry in docs/numbers.md for {sorted(missing)}"


@pytest.mark.parametrize(
    "name", ["h200-resnet18", "cpu-two-ranks", "cuda_step.json.gz", "cpu_stack_memory.json.gz"]
)
def test_every_number_that_explain_prints_has_an_entry(name: str) -> None:
    printed = json.loads(json.dumps(explanation_json(explain_job(GOLDEN / name, cache=False))))
    missing = {key for key in numbers(printed) if key not in entries()} - POSITIONS
    assert not missing, f"no entry in docs/numbers.md for {sorted(missing)}"


def test_every_number_that_top_prints_has_an_entry() -> None:
    run = explain_live(RunFollower(GOLDEN / "cpu-two-ranks").read(), now=0.0)
    printed = json.loads(json.dumps(live_json(run)))
    missing = numbers(printed) - entries() - POSITIONS
    assert not missing, f"no entry in docs/numbers.md for {sorted(missing)}"


def numbers(value: Any, key: str = "") -> set[str]:
    """Names that hold a number. Keys of a table by rank, dtype or category belong to its name."""
    if isinstance(value, dict):
        names: set[str] = set()
        for name, inner in value.items():
            table = name.isdigit() or key in ("flops", "flops_source", "phases_ms")
            names |= numbers(inner, key if table else name)
        return names
    if isinstance(value, list):
        return set().union(*(numbers(inner, key) for inner in value))
    return {key} if isinstance(value, int | float) and not isinstance(value, bool) else set()
