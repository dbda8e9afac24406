"""Hosts whose messages arrive late: by netem, or by a switch of ours where the kernel has none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Self

from lab import Lab, why_no_delay, why_not


def why_no_late_links() -> str | None:
    """Why messages cannot be late here; None if they can."""
    if reason := why_not():
        return reason
    if why_no_delay() is None:
        return None
    missing = [
        path for path in ("/dev/net/tun", shutil.which("cc") or "cc") if not Path(path).exists()
    ]
    return f"no netem in this kernel, and no {missing[0]}" if missing else None


class LateLab(Lab):
    """All messages between hosts take `delay_ms` longer."""

    def __init__(self, hosts: int, delay_ms: float) -> None:
        super().__init__(hosts)
        self._delay_ms = delay_ms
        self._relay: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if why_no_delay() is not None:
            # late_link.c: it holds the hosts' devices, and ends with this process.
            binary = self._folder / "late_link"
            source = Path(__file__).with_name("late_link.c")
            subprocess.run(["cc", "-O2", "-o", str(binary), str(source)], check=True)
            self._relay = subprocess.Popen(
                [str(binary), str(round(self._delay_ms * 1000))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        super().__enter__()
        if self._relay is None:
            for name in self.hosts:
                self.delay(name, f"{self._delay_ms}ms")
        return self

    def close(self) -> None:
        super().close()
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()

    def _plug_in(self, place: int, inside: int, link: int) -> None:
        if self._relay is None:
            super()._plug_in(place, inside, link)
            return
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write(f"{inside}\n")
        self._relay.stdin.flush()
        if self._relay.stdout.readline() != "ready\n":
            raise RuntimeError(f"host {place}: no device for late messages")
