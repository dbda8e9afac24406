"""In one process, since a cluster takes seconds to start: python on_ray.py FOLDER ANSWER.json

Explains the folder on a local cluster of two workers into ANSWER.json; then tells on stdout what
comes of files whose workers are killed.
"""

import json
import os
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path

from stepscope.explain.engines import map_in_order, ray_cluster
from stepscope.ui.cli.verbs import cli


def work(file):
    if file.name == "deadly":
        os.kill(os.getpid(), signal.SIGKILL)
    return file.name


def main():
    folder, answer = sys.argv[1:]
    with ray_cluster(2) as engine:
        with Path(answer).open("w") as out, redirect_stdout(out):
            cli.main(["explain", folder, "--json", "--engine", "ray"], standalone_mode=False)
        files = [Path(name) for name in ("a", "deadly", "b", "c", "d", "e")]
        outcomes = [str(outcome) for outcome in map_in_order(engine, work, files)]
    sys.stdout.write(json.dumps({"workers": engine.workers, "outcomes": outcomes}))


if __name__ == "__main__":
    main()
