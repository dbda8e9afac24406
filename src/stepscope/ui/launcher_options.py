"""What a launcher's command line says about its job: how many hosts, which one, where they meet."""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.trace.regular_files import read_start

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TORCH_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_HOSTS = re.compile(r"(\d{1,6})(?::(\d{1,6}))?")
_DEEPSPEED = ("deepspeed", "deepspeed.pt", "deepspeed.launcher.runner")
_ANY_HOSTS = (1, 1_000_000)  # a file lists them
_MOST_BYTES = 100_000
_CONFIGURED = re.compile(
    r"^(?P<name>num_machines|machine_rank|main_process_ip|main_process_port):[ \t]*"
    r"(?P<value>[^\s#]*)",
    re.MULTILINE,
)
_SCRIPT = re.compile(r".+\.(py|sh)")


class LauncherOptions(msgspec.Struct, frozen=True, kw_only=True):
    """None where the command does not say."""

    launcher: str
    hosts: tuple[int, int] | None = None  # at least, at most
    place: int | None = None
    job: str | None = None
    address: str | None = None
    port: str | None = None
    standalone: bool = False


def launcher_options(
    command: Sequence[str], environment: Mapping[str, str]
) -> LauncherOptions | None:
    """None if the command is no launcher that every host runs."""
    for place, word in enumerate(command):
        name = PurePath(word).name
        if name == "torchrun" or word in _TORCH_MODULES:
            return _torchrun(_given(command[place + 1 :]), environment)
        if name == "accelerate" and "launch" in command[place + 1 : place + 2]:
            return _accelerate(_given(command[place + 2 :]), environment)
        if name == "accelerate-launch" or word == "accelerate.commands.launch":
            return _accelerate(_given(command[place + 1 :]), environment)
        if name in _DEEPSPEED:
            return _deepspeed(_given(command[place + 1 :]))
    return None


def _given(words: Sequence[str]) -> dict[str, str]:
    """Options before the script; --node-rank and --node_rank are one. Flags have an empty value."""
    options: dict[str, str] = {}
    last: str | None = None
    for word in words:
        if last is None and (_SCRIPT.fullmatch(word) or word in ("-m", "--module")):
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            last = None if equals else name.replace("-", "_")
            options[name.replace("-", "_")] = value
        elif last is not None and not _SCRIPT.fullmatch(word):
            options[last], last = word, None
        elif _SCRIPT.fullmatch(word):
            break
    return options


def _torchrun(given: Mapping[str, str], environment: Mapping[str, str]) -> LauncherOptions:
    """Every option of torchrun can be given as a variable: PET_NNODES for --nnodes."""

    def value(name: str) -> str | None:
        return given.get(name) or environment.get(f"PET_{name.upper()}") or None

    host, _, port = (value("rdzv_endpoint") or "").rpartition(":")
    dynamic = (value("rdzv_backend") or "static") != "static"
    job = value("rdzv_id")
    return LauncherOptions(
        launcher="torchrun",
        hosts=_hosts(value("nnodes")),
        place=None if dynamic else _whole(value("node_rank")),
        job=None if job == "none" else job,
        address=host or value("master_addr"),
        port=port if host else value("master_port"),
        standalone="standalone" in given or environment.get("PET_STANDALONE") == "1",
    )


def _accelerate(given: Mapping[str, str], environment: Mapping[str, str]) -> LauncherOptions:
    """Options come first, then accelerate's configuration file: the one given, or its usual one."""
    known = {**_configured(_accelerate_file(given, environment)), **given}
    return LauncherOptions(
        launcher="accelerate",
        hosts=_hosts(known.get("num_machines")),
        place=_whole(known.get("machine_rank")),
        address=known.get("main_process_ip"),
        port=known.get("main_process_port"),
    )


def _accelerate_file(given: Mapping[str, str], environment: Mapping[str, str]) -> Path:
    if given.get("config_file"):
        return Path(given["config_file"])
    caches = environment.get("XDG_CACHE_HOME") or f"{environment.get('HOME', '')}/.cache"
    home = environment.get("HF_HOME") or f"{caches}/huggingface"
    return Path(home) / "accelerate" / "default_config.yaml"


def _configured(file: Path) -> dict[str, str]:
    """Four plain lines of its YAML are of interest; nothing else is read."""
    try:
        text = read_start(file, _MOST_BYTES).decode("utf-8", "replace")
    except UnreadableInputError:
        return {}
    pairs = {match["name"]: match["value"].strip("'\"") for match in _CONFIGURED.finditer(text)}
    return {name: value for name, value in pairs.items() if value not in ("null", "~", "")}


def _deepspeed(given: Mapping[str, str]) -> LauncherOptions | None:
    """Only with --no_ssh does every host run it; else the first host starts the others."""
    if "no_ssh" not in given:
        return None
    return LauncherOptions(
        launcher="deepspeed",
        hosts=_hosts(given.get("num_nodes")) or _ANY_HOSTS,
        place=_whole(given.get("node_rank")),
        address=given.get("master_addr"),
        port=given.get("master_port"),
    )


def _hosts(text: str | None) -> tuple[int, int] | None:
    """torchrun's --nnodes: 2, or 1:4 for at least one and at most four."""
    match = _HOSTS.fullmatch(text or "")
    if match is None:
        return None
    return int(match[1]), int(match[2] or match[1])


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and len(text) < 10 else None
