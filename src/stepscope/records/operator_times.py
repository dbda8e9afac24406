"""How long single operators take: what identifies a call, and what was measured of it."""

from __future__ import annotations

from typing import Any

import msgspec

from stepscope.records.words import counted


class OperatorCall(msgspec.Struct, frozen=True, kw_only=True):
    """One distinct call. Lists have one entry per argument and are JSON text, as in a trace."""

    name: str
    shapes: str
    strides: str
    dtypes: str
    concrete: str
    grads: str  # "1" for each argument that needs a gradient, else "0"
    mode: str = ""  # as records/probe_modes.py names them

    def request(self) -> dict[str, Any]:
        """As the process that times it reads it."""
        lists = {
            name: msgspec.json.decode(text) if text else None
            for name in ("shapes", "strides", "dtypes", "concrete")
            for text in (getattr(self, name),)
        }
        grads = [mark == "1" for mark in self.grads]
        return {"name": self.name, "mode": self.mode, "grads": grads, **lists}


class Output(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a call returns."""

    shape: tuple[int, ...]
    dtype: str
    needs_gradient: bool


class PassTime(msgspec.Struct, frozen=True, kw_only=True):
    ns: float
    spread: float  # half of the 95% interval, relative
    repeats: int


class ProbedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """Where a time was measured. A CPU is known by its host and its number of threads."""

    kind: str  # cuda, cpu
    device: str
    host: str = ""
    threads: int = 0
    torch: str = ""
    cudnn: str = ""
    driver: str = ""

    @property
    def place(self) -> str:
        """The device without its software; times of another place never stand for it."""
        return self.device or cpu_place(self.host, self.threads)

    @property
    def software(self) -> str:
        named = {"torch": self.torch, "cuDNN": self.cudnn, "driver": self.driver}
        return ", ".join(f"{name} {version}" for name, version in named.items() if version)


def cpu_place(host: str, threads: int) -> str:
    """A CPU as a place of times; 0 threads: not known, as many as torch takes."""
    return f"CPU of {host}, {counted(threads, 'thread')}" if threads else f"CPU of {host}"


class OperatorTime(msgspec.Struct, frozen=True, kw_only=True):
    call: OperatorCall
    outputs: tuple[Output, ...]
    forward: PassTime | None  # None: only what it returns is known
    backward: PassTime | None  # None: it has no backward, or was not timed
    place: str
    software: str
    host_ns: float | None = None  # the host's time to launch both passes
    source: str = "probe"  # or the file that it was imported from
    when_unix: float = 0.0


class TimesFile(msgspec.Struct, frozen=True, kw_only=True):
    """What `library export` writes."""

    schema: int
    times: tuple[OperatorTime, ...]
