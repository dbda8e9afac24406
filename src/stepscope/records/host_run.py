"""One `stepscope run` of a job that several of them capture together: hosts/00001.json."""

from __future__ import annotations

import msgspec

from stepscope.records.process_identity import ProcessIdentity  # noqa: TC001  (decoded at run time)


class PassedSignal(msgspec.Struct, frozen=True):
    """A signal that was passed on to the command."""

    signal: str


class HostRun(msgspec.Struct, frozen=True, kw_only=True):
    """What it wrote about itself; `place` is its number in the job, from 0, where that is known."""

    job: str = ""
    meeting: str | None = None
    place: int | None = None
    places: int | None = None
    attempt: int = 0
    host: str = ""
    stepscope: str = ""
    status: str = ""
    exit_code: int | None = None
    started_unix: float | None = None
    ended_unix: float | None = None
    process: ProcessIdentity | None = None
    signals: list[PassedSignal] = []

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"
