"""CPU time (user + system) of `stepscope --help` and of `import stepscope`.

python benchmarks/startup.py --ours PYTHON [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from process import environment, run
from targets import HELP_CPU, Result

COMMANDS = {
    "stepscope --help": ("-m", "stepscope", "--help"),
    "import stepscope": ("-c", "import stepscope"),
    "python alone": ("-c", "pass"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ours", default=sys.executable, help="a Python with stepscope")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write every number to this file")
    parser.add_argument("--check", action="store_true", help="exit 1 when the target is missed")
    chosen = parser.parse_args()
    cpu_s = measure(chosen.ours, chosen.repeats)
    result = Result(target=HELP_CPU, value=cpu_s["stepscope --help"])
    for name, value in cpu_s.items():
        print(f"{name:<48} {value:>8.3f} s")
    print(result.row())
    if chosen.json:
        chosen.json.write_text(json.dumps({"schema": 1, "cpu_s": cpu_s}, indent=1) + "\n")
    if chosen.check and not result.met:
        sys.exit(1)


def measure(python: str, repeats: int) -> dict[str, float]:
    """Medians; the commands take turns, and the first turn only compiles."""
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(repeats + 1):
        for name, arguments in COMMANDS.items():
            done = run((python, *arguments), environment(), keep_output=False, timeout_s=60)
            if done.failure:
                raise SystemExit(f"{name} failed: {done.failure}")
            if turn:
                taken[name].append(done.cpu_s)
    return {name: median(values) for name, values in taken.items()}


if __name__ == "__main__":
    main()
