"""Put on PYTHONPATH by `stepscope run`: waits for torch, then attaches.

Everything is inside try: a Python without torch or stepscope starts as usual. The user's own
sitecustomize still runs.
"""

import os
import sys


def _users_own() -> None:
    """Run the sitecustomize that ours hides, if any."""
    import importlib.machinery
    import importlib.util

    here = os.path.dirname(os.path.abspath(__file__))
    path = [p for p in sys.path if os.path.abspath(p or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _without_empty_entry() -> None:
    """Ray adds the PYTHONPATH of a node; where there is none, Python takes it for this folder."""
    here = os.path.dirname(os.path.abspath(__file__))
    if os.environ.get("PYTHONPATH") == here + os.pathsep:
        os.environ["PYTHONPATH"] = here
        del sys.path[sys.path.index(here) + 1]


def _attach() -> None:
    if not os.environ.get("STEPSCOPE_CAPTURE"):
        return
    try:
        from stepscope.measure import bootstrap
    except ImportError:
        # The job's Python is not the one stepscope is installed in: measure needs nothing else.
        home = os.path.dirname(os.path.abspath(__file__))
        for _ in range(3):
            home = os.path.dirname(home)
        sys.path.append(home)
        from stepscope.measure import bootstrap
    bootstrap.arm()


try:
    try:
        _without_empty_entry()
    except Exception:
        pass
    _users_own()
finally:
    try:
        _attach()
    except Exception:
        pass
