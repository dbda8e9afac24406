"""Put on PYTHONPATH by `stepscope run`: waits for torch, then attaches.

Everything is inside try: a Python without torch or stepscope starts as usual. The user's own
sitecustomize still runs.

The script's folder is not on the path yet, and it may hold a token.py or a types.py of its own.
So nothing is imported here but what every Python has loaded anyway, and C modules without a name
that anybody would choose.
"""

import os
import sys
import time

_BEGAN = (time.time_ns(), time.perf_counter_ns())
_HERE = os.path.dirname(os.path.abspath(__file__))
_START = '{"folder":"'  # of the settings


class _Waiter:
    """Attaches when torch is looked for."""

    def __init__(self) -> None:
        self.is_over = False
        self.path = [entry for entry in sys.path if os.path.isabs(entry)]

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        # safetensors.torch imports torch: it has to be known before.
        if self.is_over or name not in ("torch", "safetensors.torch"):
            return None
        self.is_over = True
        try:
            self.unnoticed(self.attach)  # type: ignore[no-untyped-call]
            return sys.meta_path[0].find_spec(name, path, target)
        except Exception:
            return None

    def attach(self) -> None:
        try:
            from stepscope.measure import bootstrap
        except ImportError:
            # The job's Python is not the one stepscope is installed in: measure needs nothing else.
            sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(_HERE))))
            from stepscope.measure import bootstrap
        bootstrap.arm(_BEGAN, self.unnoticed)

    def unnoticed(self, act):  # type: ignore[no-untyped-def]
        """While we import, the standard library comes before the script's folder. Afterwards the
        script still gets its own module where it has one of the same name."""
        known = {*sys.modules}
        sys.path[:0] = self.path
        try:
            act()
        finally:
            del sys.path[: len(self.path)]
            folders = [entry for entry in sys.path if entry not in self.path]
            for name in {*sys.modules} - known:
                top = name.partition(".")[0]
                if top != "stepscope" and any(_has(folder, top) for folder in folders):
                    del sys.modules[name]


def _has(folder: str, module: str) -> bool:
    place = os.path.join(folder, module)
    return os.path.exists(place + ".py") or os.path.exists(os.path.join(place, "__init__.py"))


def _users_own() -> None:
    """Run the sitecustomize that ours hides, if any."""
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import PathFinder

    path = [p for p in sys.path if os.path.abspath(p or ".") != _HERE]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _without_empty_entry() -> None:
    """Ray adds the PYTHONPATH of a node; where there is none, Python takes it for this folder."""
    if os.environ.get("PYTHONPATH") == _HERE + os.pathsep:
        os.environ["PYTHONPATH"] = _HERE
        del sys.path[sys.path.index(_HERE) + 1]


def _note_start(settings: str) -> None:
    """As measure/processes.py does it from torch's import on, without its imports."""
    from _json import encode_basestring_ascii as quoted
    from _json import scanstring

    if not settings.startswith("{"):
        from binascii import a2b_base64

        settings = a2b_base64(settings).decode()
    if not settings.startswith(_START):
        return
    folder, _ = scanstring(settings, len(_START))
    host, command = os.uname().nodename, " ".join(sys.orig_argv)[:400]
    line = f'{{"event":"started","pid":{os.getpid()},"host":{quoted(host)}'
    line += f',"unix":{time.time()},"command":{quoted(command)}}}\n'
    hosts = os.path.join(folder, "hosts")
    for _ in range(2):
        try:
            with open(os.path.join(hosts, f"{host}.processes.jsonl"), "ab", buffering=0) as file:
                file.write(line.encode())
            return
        except FileNotFoundError:  # the first process of a host that does not share the disk
            os.makedirs(hosts, exist_ok=True)


try:
    try:
        _without_empty_entry()
    except Exception:
        pass
    _users_own()
finally:
    if os.environ.get("STEPSCOPE_CAPTURE"):
        try:
            sys.meta_path.insert(0, _Waiter())
            _note_start(os.environ["STEPSCOPE_CAPTURE"])
        except Exception:
            pass
