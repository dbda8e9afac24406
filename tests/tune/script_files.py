"""The training scripts in scripts/: what each is, how it is started, what is planted in it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "scripts"


@dataclass(frozen=True, slots=True)
class TrainingScript:
    """One file. `planted` names the remedies of which `tune` must keep one."""

    name: str
    ranks: int = 1
    planted: frozenset[str] = frozenset()
    options: tuple[str, ...] = ()  # of `stepscope tune`

    @property
    def text(self) -> str:
        return (FOLDER / f"{self.name}.py").read_text()

    def command(self, path: Path) -> list[str]:
        if self.ranks == 1:
            return [sys.executable, str(path)]
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        return [sys.executable, *launcher, f"--nproc-per-node={self.ranks}", str(path)]


SCRIPTS = {
    script.name: script
    for script in (
        TrainingScript("plain_loop"),
        TrainingScript("trainer_class"),
        TrainingScript("hooks"),
        TrainingScript("two_ranks", ranks=2),
        TrainingScript("accumulates", ranks=2, planted=frozenset({"sync-once"})),
        TrainingScript("convolutions"),
        TrainingScript("slow_loader", planted=frozenset({"loader-workers"})),
        TrainingScript(
            "slow_loader_drawn",
            planted=frozenset({"loader-workers"}),
            options=("--allow", "random"),
        ),
        TrainingScript("own_autocast"),
        TrainingScript("mis_threaded", planted=frozenset({"threads", "one-thread"})),
        TrainingScript("healthy"),
    )
}
