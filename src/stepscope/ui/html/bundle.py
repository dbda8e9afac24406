"""The page's ES modules as one script, put together when a page is rendered: no tool is needed.

A module becomes a function that returns its exports, after the modules that it imports. Comments
and indentation are left out. Scripts may import and export in these ways only:

    import { a, b as c } from "./x.js";
    export function f() {}     export class C {}     export const K = 1;
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

_IMPORT = re.compile(r'^import (?:\{([^}]*)\} from )?"\./(\w+)\.js";$')
_EXPORT = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)")
_CAST = re.compile(r"/\*\* @(?:type|param) .*?\*/ ?")


@cache
def bundle(*entries: str) -> str:
    """Run these modules in this order, each after what it imports."""
    done: dict[str, str] = {}
    for entry in entries:
        _add(entry, done, ())
    return '(() => {\n"use strict";\n' + "".join(done.values()) + "})();\n"


def read_page_file(name: str) -> str:
    """A script, style or template."""
    return files("stepscope.ui.html").joinpath("page", name).read_text(encoding="utf-8")


def has_page_file(name: str) -> bool:
    return files("stepscope.ui.html").joinpath("page", name).is_file()


def _add(name: str, done: dict[str, str], above: tuple[str, ...]) -> None:
    if name in done:
        return
    if name in above:
        raise ValueError(f"scripts import each other in a circle: {' -> '.join((*above, name))}")
    body: list[str] = []
    exports: list[str] = []
    for line in _code_lines(read_page_file(f"{name}.js")):
        if imported := _IMPORT.match(line):
            names, module = imported.groups()
            _add(module, done, (*above, name))
            if names:
                body.append(f"const {{{names.replace(' as ', ': ')}}} = ${module};")
            continue
        if line.startswith(("import ", "export ")):
            exported = _EXPORT.match(line)
            if exported is None:
                raise ValueError(f"{name}.js: the bundler does not know {line!r}")
            exports.append(exported[1])
            line = line.removeprefix("export ")
        body.append(line)
    inside = "\n".join(body)
    done[name] = (
        f"const ${name} = (() => {{\n{inside}\nreturn {{ {', '.join(exports)} }};\n}})();\n"
    )


def _code_lines(source: str) -> list[str]:
    lines: list[str] = []
    comment = False
    for line in source.splitlines():
        code = line.strip()
        opens = code.startswith("/**") and "*/" not in code
        if comment or opens:
            comment = "*/" not in code
            continue
        code = _CAST.sub("", code)
        if not code or code.startswith("//") or (code.startswith("/**") and code.endswith("*/")):
            continue
        lines.append(code)
    return lines
