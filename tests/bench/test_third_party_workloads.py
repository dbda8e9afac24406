"""Workloads of other packages: found by their entry points, refused in words when broken."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.bench import catalogue
from stepscope.errors import UsageError

EXAMPLE = Path(__file__).parent / "example_package"
DOCS = Path(__file__).parents[2] / "docs/how-to/own-workloads.md"


def install(folder: Path, package: str, entries: str, module: str | None = None) -> None:
    """Put a package's metadata, and a module of its own, where Python looks for them."""
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{catalogue.GROUP}]\n{entries}\n")
    if module is not None:
        (folder / f"{package}.py").write_text(module)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_example_package_is_found_and_loaded(site: Path) -> None:
    install(site, "example_workload", "small-perceptron = example_workload:WORKLOAD")
    shutil.copy(EXAMPLE / "example_workload.py", site)
    assert "small-perceptron" in catalogue.names()
    workload = catalogue.load("small-perceptron")
    assert workload.config("tiny", {"batch": "8"}).batch == 8
    assert catalogue.problems() == ()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise OSError('no disk')", "OSError: no disk"),
        ("OTHER = 1", "AttributeError"),
        ("WORKLOAD = 3", "is not a stepscope.bench.workload.TrainingWorkload"),
        ("NAME = 'other'", "it calls itself other, but the entry point must have the same name"),
        (
            "SIZES = {'huge': {'batch': 1}}",
            "its sizes are huge. Possible sizes are tiny, small, paper",
        ),
        ("SIZES = {'tiny': {}}", "size tiny has no batch"),
        ("SIZES = {'tiny': {'batch': 1}}", "size tiny has no target"),
    ],
)
def test_a_broken_package_is_said_in_one_line(site: Path, module: str, said: str) -> None:
    if module.startswith(("NAME", "SIZES")):
        module = f"""
from stepscope.bench.workload import Target, TrainingWorkload
NAME, SIZES = "broken", {{"tiny": {{"batch": 1}}}}
{module}
WORKLOAD = TrainingWorkload(name=NAME, task="", source="", samples="", sizes=SIZES, targets={{}},
                            build=lambda config, place: None)
"""
    name = f"broken_{abs(hash(module))}"  # modules are imported once
    install(site, name, f"broken = {name}:WORKLOAD", module)
    assert "broken" in catalogue.names()  # it is listed: nothing is imported for that
    with pytest.raises(UsageError, match="workload broken of package broken_") as error:
        catalogue.load("broken")
    assert said in str(error.value)


def test_two_packages_with_one_name_are_refused(site: Path) -> None:
    install(site, "one", "same = one:WORKLOAD")
    install(site, "two", "same = two:WORKLOAD")
    with pytest.raises(UsageError, match="2 packages have a workload same: package one and "):
        catalogue.load("same")
    assert catalogue.names().count("same") == 1


def test_nobody_replaces_a_workload_of_the_suite(site: Path) -> None:
    install(site, "thief", "gpt2 = thief:WORKLOAD", "WORKLOAD = 3")
    assert catalogue.load("gpt2").name == "gpt2"
    assert catalogue.problems() == (
        "package thief declares a workload gpt2, which is also one of the suite's. The "
        "suite's is run",
    )


def test_a_name_that_is_nearly_right_is_offered(site: Path) -> None:
    install(site, "example_workload", "small-perceptron = example_workload:WORKLOAD")
    with pytest.raises(UsageError, match="did you mean small-perceptron"):
        catalogue.load("small-perceptrons")


def test_the_docs_show_the_example_as_it_is() -> None:
    shown = re.findall(r"```(?:python|toml)\n(.*?)```", DOCS.read_text(), re.DOTALL)
    files = [(EXAMPLE / name).read_text() for name in ("pyproject.toml", "example_workload.py")]
    assert shown == files


@pytest.mark.slow
def test_the_example_package_installs_and_trains(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(EXAMPLE, source)
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    known = {**os.environ, "PYTHONPATH": str(target)}
    listed = subprocess.run(
        [sys.executable, "-m", "stepscope", "bench", "--list"],
        env=known,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "small-perceptron" in listed.stdout
    train = [sys.executable, "-m", "stepscope.bench.train", "small-perceptron", "--losses"]
    subprocess.run([*train, str(tmp_path / "losses.json")], env=known, check=True)
    assert (tmp_path / "losses.json").exists()
