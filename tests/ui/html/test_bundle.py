"""The page's modules in one script: in the order of their imports, without comments."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from stepscope.ui.html import render as bundle_module
from stepscope.ui.html.render import bundle

PAGE = Path(bundle_module.__file__).parent / "page"


@pytest.fixture
def modules(monkeypatch):
    """Scripts that exist for one test."""
    scripts: dict[str, str] = {}
    monkeypatch.setattr(bundle_module, "read_page_file", scripts.__getitem__)
    bundle.cache_clear()
    yield scripts
    bundle.cache_clear()


def test_a_module_comes_once_and_after_what_it_imports(modules):
    modules["a.js"] = (
        'import { two } from "./b.js";\nimport { three as third } from "./c.js";\ntwo(third);'
    )
    modules["b.js"] = 'import { three } from "./c.js";\nexport function two() {}'
    modules["c.js"] = "export const three = 3;"
    text = bundle("a", "b")
    assert [text.count(f"const ${name} =") for name in "abc"] == [1, 1, 1]
    assert text.index("const $c") < text.index("const $b") < text.index("const $a")
    assert "const { three: third } = $c;" in text
    assert "return { two };" in text


def test_comments_types_and_indentation_are_left_out(modules):
    modules["a.js"] = "\n".join(
        [
            "// What it is for.",
            "/**",
            " * @typedef {object} T",
            " */",
            "/** Adds. @param {number} x */",
            "export function add(x) {",
            "  return /** @type {number} */ (x) + 1; // why",
            "}",
        ]
    )
    inside = bundle("a").partition("const $a = (() => {\n")[2].partition("return { add")[0]
    assert inside == "function add(x) {\nreturn (x) + 1; // why\n}\n"


@pytest.mark.parametrize(
    "line",
    ["export default 1;", "export { x };", 'import x from "./b.js";', "export let x = 1;"],
)
def test_what_the_bundler_does_not_know_is_refused(modules, line):
    modules["a.js"], modules["b.js"] = line, ""
    with pytest.raises(ValueError, match="does not know"):
        bundle("a")


def test_a_circle_is_refused(modules):
    modules["a.js"], modules["b.js"] = 'import "./b.js";', 'import "./a.js";'
    with pytest.raises(ValueError, match="a -> b -> a"):
        bundle("a")


def test_every_script_of_the_page_is_used_and_small_enough_to_read():
    panes = ("run", "timeline", "flames", "tables", "memory", "whatif", "ranks")
    text = bundle(*panes, "main", "comparison", "tune_page", "bench_page", "laboratory_page")
    names = {path.stem for path in PAGE.glob("*.js")}
    assert set(re.findall(r"^const \$(\w+) = ", text, re.MULTILINE)) == names
    assert all(path.read_text().count("\n") <= 450 for path in PAGE.glob("*.js"))


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on PATH")
def test_the_bundle_is_a_script_that_parses(tmp_path):
    (tmp_path / "page.cjs").write_text(bundle("run", "timeline", "whatif", "ranks", "main"))
    subprocess.run(["node", "--check", tmp_path / "page.cjs"], check=True, capture_output=True)
