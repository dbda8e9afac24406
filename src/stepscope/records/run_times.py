"""When a rank's part of a command began and ended, and what is known of its start-up."""

from __future__ import annotations

import msgspec


class RunTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Unix times of the command; of one attempt where a job was restarted."""

    began_ns: int
    ended_ns: int
    attempt: int = 1
    imports_ns: int = 0  # from the start of the process to torch's import, inside the first step
    group_ns: int = 0  # inside init_process_group
    first_batch_ns: int | None = None  # when it arrived; None without a data loader
    after_last_ns: dict[str, int] = {}  # evaluation and checkpoints after the last step
    notes: tuple[str, ...] = ()
