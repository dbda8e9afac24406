"""Acting after an import: whoever looks for the module first, and however it is loaded."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.measure import patches
from stepscope.measure.patches import expect, when_imported

NAME = "stepscope_test_module"


@pytest.fixture
def acted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The modules that were acted on; the module lies on the path, not imported yet."""
    (tmp_path / f"{NAME}.py").write_text("VALUE = 1\n")
    (tmp_path / "stepscope_test_broken.py").write_text("raise RuntimeError\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    modules: list[Any] = []
    when_imported(NAME, modules.append)
    yield modules
    sys.meta_path[:] = finders
    sys.modules.pop(NAME, None)
    patches._actions.clear()


def test_looking_for_a_module_is_not_importing_it(acted: list[Any]) -> None:
    for _ in range(3):
        assert importlib.util.find_spec(NAME) is not None
    assert acted == []
    module = importlib.import_module(NAME)
    assert acted == [module]
    assert module.VALUE == 1


def test_a_lazy_import_acts_when_the_module_is_first_used(acted: list[Any]) -> None:
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    assert acted == []
    assert module.VALUE == 1
    assert acted == [module]


def test_an_action_given_while_the_module_is_loaded_waits_until_it_is(
    acted: list[Any], tmp_path: Path
) -> None:
    """As safetensors does: it imports torch, and torch's own action asks for safetensors."""
    first, second = "stepscope_test_outer", "stepscope_test_inner"
    (tmp_path / f"{first}.py").write_text(f"import {second}\nVALUE = 2\n")
    (tmp_path / f"{second}.py").write_text("")
    values: list[int] = []
    expect(first)
    when_imported(
        second, lambda _inner: when_imported(first, lambda outer: values.append(outer.VALUE))
    )
    importlib.import_module(first)
    assert values == [2]


def test_a_module_that_is_loaded_again_is_acted_on_again(acted: list[Any]) -> None:
    module = importlib.import_module(NAME)
    importlib.reload(module)
    assert acted == [module, module]


def test_a_module_that_is_there_is_acted_on_at_once() -> None:
    modules: list[Any] = []
    when_imported("json", modules.append)
    assert [module.__name__ for module in modules] == ["json"]


def test_a_finder_that_asks_all_finders_does_not_make_it_act_twice(acted: list[Any]) -> None:
    class Asking:
        """As import hooks of other tools do."""

        busy = False

        def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
            if name != NAME or self.busy:
                return None
            self.busy = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.busy = False

    for place in (0, len(sys.meta_path)):
        sys.meta_path.insert(place, Asking())
        module = importlib.import_module(NAME)
        assert acted == [module]
        del sys.modules[NAME], sys.meta_path[place]
        acted.clear()


def test_an_import_that_fails_is_not_acted_on_and_fails_as_before(acted: list[Any]) -> None:
    when_imported("stepscope_test_broken", acted.append)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            importlib.import_module("stepscope_test_broken")
    assert acted == []


def test_capture_attaches_whatever_looked_for_torch_before(tmp_path: Path) -> None:
    """Hugging Face libraries ask whether torch is there before anybody imports it."""
    script = tmp_path / "train.py"
    script.write_text(
        "import importlib.util\n"
        "for name in ('torch', 'torch', 'torch.utils.data'):\n"
        "    importlib.util.find_spec(name)\n"
        "import torch\n"
        "weight = torch.ones(3, requires_grad=True)\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "for _ in range(3):\n"
        "    weight.sum().backward()\n"
        "    optimizer.step()\n"
    )
    out = tmp_path / "run"
    ours = [sys.executable, "-m", "stepscope", "run", "--no-explain", "--out", str(out), "--"]
    subprocess.run([*ours, sys.executable, str(script)], check=True, timeout=120)
    assert len((out / "rank-00000/steps.jsonl").read_text().splitlines()) == 3
