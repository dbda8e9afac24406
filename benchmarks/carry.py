"""Bring stepscope's dependencies to a machine without network: unpack their wheels into one folder.

    python benchmarks/carry.py [--python 3.12] [--machine x86_64] [--numpy]
    PYTHONPATH=.carry/site:src python -m stepscope --help          # on the other machine

The list comes from pyproject.toml. torch is not brought, and numpy only with --numpy: a machine
that trains has both.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT_BYTES = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="3.12", help="Python's version on the other machine")
    parser.add_argument("--machine", default="x86_64", help="its processor, as `uname -m` says")
    parser.add_argument("--out", type=Path, default=ROOT / ".carry/site")
    parser.add_argument("--numpy", action="store_true", help="bring numpy too")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as wheels:
        _download(dependencies(numpy=options.numpy), Path(wheels), options.python, options.machine)
        for wheel in sorted(Path(wheels).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(options.out)
            print(wheel.name)
    size_bytes = sum(file.stat().st_size for file in options.out.rglob("*") if file.is_file())
    print(f"{options.out}: {size_bytes / 2**20:.1f} MiB")
    if size_bytes > LIMIT_BYTES:
        sys.exit(f"over {LIMIT_BYTES >> 20} MiB")


def dependencies(*, numpy: bool) -> list[str]:
    """Requirements of the package itself, without its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        requirement
        for requirement in project["dependencies"]
        if numpy or re.split(r"[^\w.-]", requirement)[0] != "numpy"
    ]


def _download(requirements: list[str], folder: Path, python: str, machine: str) -> None:
    """All wheels that these need."""
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else ["pip"]
    platforms = [f"manylinux2014_{machine}", f"manylinux_2_28_{machine}"]
    subprocess.run(
        [
            *(*pip, "download", "--quiet", "--dest", str(folder), "--only-binary=:all:"),
            *("--python-version", python, "--implementation", "cp"),
            *(word for platform in platforms for word in ("--platform", platform)),
            *requirements,
        ],
        check=True,
    )


if __name__ == "__main__":
    main()
