"""docs/reference/json.md has a line for every field, and leads to the code that computes it."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from json_paths import NOT_PRINTED, record_paths, value_paths
from stepscope.explain.explain_job import explain_job
from stepscope.explain.whole_run.live import explain_live
from stepscope.trace.run_folder.follow_run import RunFollower
from stepscope.ui.cli.top import live_json
from stepscope.ui.serve.run_rows import run_json
from stepscope.ui.terminal.health import check_health
from stepscope.ui.topics.explanation_json import explanation_json
from verb_process import run_verb

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/reference/json.md"
GENERATOR = ROOT / "docs/generate"
GOLDEN = ROOT / "tests/golden"
LONGEST_MEANING = 22  # words

# What a verb prints: where a record stands in the object, and the record's class.
ROOTS = {
    "explain": {
        "headline": "Headline",
        "ranks_without_trace": "RanksWithoutTrace",
        "budget": "Budget",
        "ranks[].budget": "Budget",
        "ranks[].steps[]": "Step",
        "ranks[].step_ms": "StepTime",
        "ranks[].kernels[]": "Kernel",
        "ranks[].operators[]": "Operator",
        "ranks[].modules[]": "Module",
        "ranks[].lines[]": "PythonFunction",
        "ranks[].launches": "Launches",
        "ranks[].copies[]": "Copy",
        "ranks[].syncs[]": "SyncCall",
        "ranks[].compiled": "CompiledWork",
        "ranks[].efficiency": "Efficiency",
        "ranks[].memory": "Memory",
        "ranks[].quality[]": "Note",
        "quality[]": "Note",
        "findings[]": "Finding",
        "advice[]": "Advice",
        "collectives[]": "JobCollective",
        "stragglers": "Stragglers",
        "clock.hosts[]": "HostClock",
        "arrivals[]": "LastArriver",
        "critical_path": "CriticalPath",
        "hierarchical[]": "HierarchicalAllReduce",
        "strategies[]": "Strategy",
        "nccl": "NcclSummary",
        "together": "TogetherSummary",
        "run": "WholeRun",
        "run.remedies[]": "RunRemedy",
        "run.failed": "FailedCommand",
    },
    "whatif": {"consistency": "ConsistencyPromise"},
    "gpus": {"": "GpuComparison"},
    "compare": {"": "Comparison"},
    "tune": {"": "TuneResult"},
    "sweep": {"trials[]": "EndedTrial"},
    "bench": {"": "BenchResults", "against": "BenchComparison"},
    "record": {
        "promises[]": "Promise",
        "promises[].delivery": "Delivery",
        "ignored[]": "Delivery",
        "what_ifs[]": "Summary",
    },
    "probe": {"": "ProbeReport"},
    "calibrate": {
        "profile": "Profile",
        "collectives[]": "CollectiveRow",
        "comparison": "AlgorithmComparison",
        "laboratory": "LaboratoryReport",
    },
    "gather": {"": "Gathered"},
    "doctor": {"checks[]": "Check"},
    "why": {"": "FindingPage"},
    "hang": {"": "HangAnswer"},
}
# Names that the functions for JSON add to the records, and one that they leave out.
ADDED = {
    "explain": ("several[]", "together.gain", "together.staleness.pulls", "collectives[].total_ns"),
    "compare": ("sentence", "promise.delivered_ms", "promise.error", "promise.inside"),
    "sweep": ("script", "settings", "best"),
    "bench": ("workloads[].task", "workloads[].source", "workloads[].tags[]", "workloads[].sizes"),
    "record": (
        *("unread_lines", "promises[].name", "promises[].delivered_ms"),
        *("promises[].error", "promises[].inside"),
    ),
    "probe": ("difference", "library", "places[].place", "places[].software", "places[].mode"),
    "calibrate": (
        *("saved", "measured", "laboratory.link.alpha_ns", "laboratory.link.beta_ns_per_byte"),
    ),
}
LEFT_OUT = {
    "compare": ("workload.device",),
    "explain": (
        *(f"together.notes[].{name}" for name in ("id", "detail", "count", "byte_offset")),
    ),
}


def load_fields() -> Any:
    sys.path.insert(0, str(GENERATOR))
    try:
        return importlib.import_module("fields_tables")
    finally:
        sys.path.remove(str(GENERATOR))


TABLES = load_fields().read_tables()
EVERYWHERE = {
    name.removesuffix("[]")
    for table in TABLES
    if table.at == ("*",)
    for field in table.fields
    for name in field.names
}


def documented(verb: str) -> list[str]:
    return [path for table in TABLES for owner, path in table.paths() if owner == verb]


def is_documented(path: str, entries: Entries) -> bool:
    """Whether a line has this path or an object around it, or its name means one thing always."""
    name = parts_of(path)[-1]
    return any(fnmatch(name, pattern) for pattern in EVERYWHERE) or entries.cover(path)


def parts_of(path: str) -> tuple[str, ...]:
    return tuple(part.rstrip("[]") for part in path.split("."))


class Entries:
    """Documented paths. `.*` stands for any key; at the end it may be left out."""

    def __init__(self, paths: Iterable[str]) -> None:
        parts = {parts_of(path.removesuffix(".*")) for path in paths}
        self.exact = {entry for entry in parts if "*" not in entry}
        self.wild = parts - self.exact
        self.around = {entry[:count] for entry in parts for count in range(1, len(entry))}

    def cover(self, path: str) -> bool:
        """Whether a line has this path, an object around it, or what it holds when not empty."""
        parts = parts_of(path)
        is_in = any(self._has(parts[:count]) for count in range(1, len(parts) + 1))
        return is_in or parts in self.around

    def _has(self, parts: tuple[str, ...]) -> bool:
        return parts in self.exact or any(is_alike(parts, entry) for entry in self.wild)


def is_alike(parts: tuple[str, ...], entry: tuple[str, ...]) -> bool:
    return len(parts) == len(entry) and all(
        known in ("*", part) for part, known in zip(parts, entry, strict=True)
    )


def of_records(verb: str) -> set[str]:
    known = {
        path
        for prefix, record in ROOTS.get(verb, {}).items()
        for path in record_paths(record, prefix)
    }
    return (known | set(ADDED.get(verb, ()))) - set(LEFT_OUT.get(verb, ()))


@pytest.mark.parametrize("verb", ROOTS)
def test_every_field_of_a_record_has_a_line(verb: str) -> None:
    entries = Entries(documented(verb))
    missing = {path for path in of_records(verb) if not is_documented(path, entries)}
    assert not missing, "docs/reference/fields.toml lacks:\n" + "\n".join(sorted(missing))


@pytest.mark.parametrize(
    "name", ["h200-resnet18", "cpu-two-ranks", "cuda_step.json.gz", "cpu_stack_memory.json.gz"]
)
def test_every_field_that_explain_prints_has_a_line(name: str) -> None:
    explanation = explain_job(GOLDEN / name, cache=False)
    lacks(as_printed(explanation_json(explanation)), "explain")


def test_every_field_that_top_and_health_print_has_a_line() -> None:
    run = explain_live(RunFollower(GOLDEN / "cpu-two-ranks").read(), now=0.0)
    lacks(as_printed(live_json(run)), "top")
    explanation = explain_job(GOLDEN / "cpu-two-ranks", cache=False)
    lacks(as_printed(vars_of(check_health(explanation, [{"rank": 0}]))), "health")


@pytest.mark.parametrize("options", [(), ("--set", "batch=x2"), ("--list",)], ids=str)
def test_every_field_that_whatif_prints_has_a_line(options: tuple[str, ...]) -> None:
    lacks(print_json("whatif", *(() if options == ("--list",) else (H200,)), *options), "whatif")


def test_every_field_that_gpus_and_compare_print_has_a_line() -> None:
    lacks(print_json("gpus", H200), "gpus")
    lacks(print_json("compare", H200, H200), "compare")


def test_every_row_of_serve_has_a_line() -> None:
    lacks(as_printed({"runs": [run_json(Mock(), ("tag",))]}), "serve")


def test_every_field_of_the_files_of_a_run_has_a_line() -> None:
    rank = GOLDEN / "cpu-two-ranks/rank-00000"
    files = [rank / name for name in ("rank.json", "memory.json", "clock.json")]
    files += [GOLDEN / "cpu-two-ranks/run.json", GOLDEN / "h200-resnet18/rank-00000/samples.json"]
    for file in files:
        lacks(json.loads(file.read_text()), file.name)
    for line in (rank / "steps.jsonl").read_text().splitlines():
        lacks(json.loads(line), "steps.jsonl")


def test_no_line_is_about_a_field_that_nothing_prints() -> None:
    stale = []
    for verb in ROOTS:
        known = with_all_around({*of_records(verb), *printed_by_hand(verb)})
        for path in documented(verb):
            entry = parts_of(path.removesuffix(".*"))
            if entry not in known and not any(is_alike(parts, entry) for parts in known):
                stale.append(f"{verb}: {path}")
    assert not stale, "docs/reference/fields.toml names what nothing prints:\n" + "\n".join(stale)


def test_every_function_exists() -> None:
    named = {field.by for table in TABLES for field in table.fields}
    assert len(named) > 150
    gone = [name for name in sorted(named) if not exists(*f"stepscope.{name}".split(":"))]
    assert not gone, "docs/reference/fields.toml names functions that are gone:\n" + "\n".join(gone)


def test_a_meaning_is_one_short_line() -> None:
    meanings = [field.meaning for table in TABLES for field in table.fields]
    assert [text for text in meanings if not text or len(text.split()) > LONGEST_MEANING] == []
    assert [text for text in meanings if not text.endswith(".")] == []


def test_generated_parts_of_the_docs_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, str(GENERATOR), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, f"run `python docs/generate`:\n{done.stdout}{done.stderr}"


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


H200 = str(GOLDEN / "h200-resnet18")
STALENESS = ("staleness.pulls", "staleness.mean", "staleness.largest", "staleness.counts[]")


def print_json(verb: str, *options: str) -> Any:
    done = run_verb(verb, *options, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def lacks(printed: Any, owner: str) -> None:
    entries = Entries(documented(owner))
    paths = {path for path in value_paths(printed) if parts_of(path)[-1] not in NOT_PRINTED}
    missing = {path for path in paths if not is_documented(path, entries)}
    assert not missing, f"docs/reference/fields.toml, {owner}: {sorted(missing)}"


def as_printed(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def vars_of(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def printed_by_hand(verb: str) -> Iterator[str]:
    """Yield what functions put together that are no records."""
    if verb == "explain":
        for name in ("h200-resnet18", "cpu-two-ranks"):
            explanation = explain_job(GOLDEN / name, cache=False)
            yield from value_paths(as_printed(explanation_json(explanation)))
        rack = ("hosts[].rack", "hosts[].switch")
        link = ("from", "to", "gb_s", "busy_gb_s", "device_gb_s", "sent_bytes", "connections")
        yield from (*rack, *(f"links[].{name}" for name in (*link, "rtt_us", "retransmitted")))
        yield from (f"together.{name}" for name in STALENESS)
    if verb == "whatif":
        yield from value_paths(print_json("whatif", H200, "--set", "batch=x2"))
        yield from ("tried[]", "whatifs[].name", "whatifs[].help")
        yield from (f"consistency.{name}" for name in STALENESS)
    if verb == "probe":
        yield "places[].calls"


def with_all_around(paths: Iterable[str]) -> set[tuple[str, ...]]:
    """Return these paths and those of the objects that they are in."""
    return {parts_of(path)[:count] for path in paths for count in range(1, path.count(".") + 2)}


def exists(module: str, name: str) -> bool:
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError):
        return False
    return True


def any_split_exists(name: str) -> bool:
    """Whether some part of the dotted name is a module, and the rest is in it."""
    parts = name.split(".")
    if any(
        exists(".".join(parts[:place]), ".".join(parts[place:])) for place in range(1, len(parts))
    ):
        return True
    return exists(name, "__name__")
