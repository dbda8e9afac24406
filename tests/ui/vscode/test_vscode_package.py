"""The extension's package against the language server and the house's rules, without node."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import stepscope

ROOT = Path(__file__).parents[3]
EXTENSION = ROOT / "editors/vscode"
SETTINGS = ["python", "arguments", "profileOnSave", "limitSeconds", "hints"]
COMMANDS = ["profile", "stop", "profileOnSave", "setBatch", "openReport"]


def package() -> dict[str, Any]:
    return dict(json.loads((EXTENSION / "package.json").read_text()))


def sources(folder: str) -> str:
    return "\n".join(path.read_text() for path in sorted((EXTENSION / folder).rglob("*.ts")))


def test_it_has_the_version_and_the_licence_of_stepscope() -> None:
    assert package()["version"] == stepscope.__version__
    assert f'license = "{package()["license"]}"' in (ROOT / "pyproject.toml").read_text()


def test_commands_are_those_of_the_contract_and_one_of_its_own() -> None:
    names = [one["command"] for one in package()["contributes"]["commands"]]
    assert names == [f"stepscope.{name}" for name in [*COMMANDS, "restart"]]


def test_settings_are_those_of_the_contract() -> None:
    settings = package()["contributes"]["configuration"]["properties"]
    assert list(settings) == [f"stepscope.{name}" for name in SETTINGS]
    assert settings["stepscope.limitSeconds"]["default"] == 60


def test_the_server_knows_every_command_setting_and_message() -> None:
    lsp = pytest.importorskip("stepscope.ui.lsp", reason="no language server in this version")
    server = "\n".join(path.read_text() for path in Path(lsp.__file__).parent.glob("*.py"))
    contract = (EXTENSION / "src/contract.ts").read_text()
    messages = re.findall(r'^export const \w+ = "(stepscope/\w+)";$', contract, re.MULTILINE)
    assert messages == ["stepscope/panel", "stepscope/changed", "stepscope/live"]
    for name in [*messages, *(f"stepscope.{command}" for command in COMMANDS), *SETTINGS]:
        assert f'"{name}"' in server, name


def test_every_menu_entry_names_a_command() -> None:
    contributed = package()["contributes"]
    commands = {one["command"] for one in contributed["commands"]}
    entries = [one["command"] for menu in contributed["menus"].values() for one in menu]
    assert entries
    assert commands.issuperset(entries)


def test_files_that_the_package_ships_are_there_or_built() -> None:
    shipped = [
        line[1:]
        for line in (EXTENSION / ".vscodeignore").read_text().splitlines()
        if line.startswith("!")
    ]
    built = [name for name in shipped if name.startswith("out/") or name == "LICENSE"]
    assert {"out/extension.js", "out/page.js", "out/page.css", "out/licences.txt"} < {*built}
    assert [name for name in {*shipped} - {*built} if not (EXTENSION / name).is_file()] == []
    bundler = (EXTENSION / "esbuild.mjs").read_text()
    assert [name for name in built if name not in bundler] == []


def test_the_lock_file_names_no_registry() -> None:
    lock = json.loads((EXTENSION / "package-lock.json").read_text())
    assert [name for name, one in lock["packages"].items() if "resolved" in one] == []
    wanted = package()["dependencies"] | package()["devDependencies"]
    locked = {name: lock["packages"][f"node_modules/{name}"]["version"] for name in wanted}
    assert locked == wanted


def test_nothing_is_loaded_from_elsewhere_and_text_stays_text() -> None:
    code = sources("src")
    assert re.findall(r"https?://", code) == []
    assert (
        re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", code) == []
    )


def test_files_are_small_enough_to_read() -> None:
    long = [
        path.name
        for folder in ("src", "test")
        for path in (EXTENSION / folder).rglob("*.ts")
        if len(path.read_text().splitlines()) > 450
    ]
    assert long == []
