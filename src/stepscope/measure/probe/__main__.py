"""Answers requests to describe or time operators: one JSON object per line, in and out.

What crashes here leaves the parent alive, and it starts another child.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from typing import Any

# Attaching the profiler anew for each call would take longer than most calls.
os.environ["TEARDOWN_CUPTI"] = "0"

import torch

from stepscope.measure.probe.arguments import CannotRebuildError
from stepscope.measure.probe.timing import ProbedCall, driver_version, warm_up


def main() -> None:
    # Libraries may print: only answers go to the parent.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line), device)) + "\n")
        answers.flush()


def answer(request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The answer to one request; a call that cannot be made says why."""
    if request["do"] == "start":
        if request.get("threads"):
            torch.set_num_threads(request["threads"])
        warm_up(device)
        facts: dict[str, Any] = {
            "kind": device.type,
            "device": "",
            "host": platform.node(),
            "threads": torch.get_num_threads() if device.type == "cpu" else 0,
            "torch": torch.__version__,
            "cudnn": "",
            "driver": "",
        }
        if device.type == "cuda":
            facts["device"] = torch.cuda.get_device_name(device)
            facts["cudnn"] = str(torch.backends.cudnn.version() or "")
            facts["driver"] = driver_version()
        return facts
    try:
        if request["do"] == "describe":
            return ProbedCall.describe_cheaply(request, device)
        call = ProbedCall(request, device)
        if request["do"] == "host":
            return call.measure_host()
        return call.measure(request["seconds"], backward=request.get("backward", True))
    except CannotRebuildError as error:
        return {"error": str(error)}
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"error": "it needs more memory than is free"}
    except Exception as error:
        return {"error": str(error).strip().splitlines()[0] if str(error) else type(error).__name__}


if __name__ == "__main__":
    main()
