"""The README shows what stepscope prints: its output and its pictures come from kept runs."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DIGESTS = json.loads((ROOT / "docs/images/pictures.json").read_text())


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_output_in_the_readme_is_what_the_command_prints(pictures: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    (shown,) = re.findall(r"^\$ stepscope run -- python train\.py\n(.+?)^```$", readme, re.S | re.M)
    assert shown.rstrip() in pictures.explain(colours=False)


@pytest.mark.parametrize("name", DIGESTS)
def test_a_picture_shows_what_stepscope_prints_today(name: str, pictures: ModuleType) -> None:
    """If it fails: look at what changed, then `make pictures`."""
    assert pictures.digest(pictures.PICTURES[name].shown()) == DIGESTS[name]


def test_every_picture_is_drawn_by_the_script(pictures: ModuleType) -> None:
    assert set(DIGESTS) == set(pictures.PICTURES)
    for name in DIGESTS:
        assert (ROOT / "docs/images" / name).stat().st_size > 1000


def test_pictures_load_nothing_from_elsewhere() -> None:
    for file in (ROOT / "docs/images").glob("*.svg"):
        loaded = re.findall(r"(?:href|src)=\"(https?:[^\"]+)|url\((https?:[^)]+)", file.read_text())
        assert not loaded, file.name


def test_the_story_was_told_by_commands_that_still_exist(pictures: ModuleType) -> None:
    """What `run` and `tune` printed on the GPU is kept as it was; its labels are today's."""
    shown = {name: pictures.plain(text) for name, text in pictures.scenes().items()}
    first = {
        line.split()[0] for line in pictures.explain(colours=False).splitlines() if line[:1].strip()
    }
    for label in ("verdict", "why", "next"):
        assert label in first
        assert re.search(rf"^{label} ", shown["run"], re.M)
        assert re.search(rf"^{label} ", shown["tune"], re.M)
