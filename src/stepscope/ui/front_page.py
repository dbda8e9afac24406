"""The first page, `stepscope --help`: the verbs in groups. It loads no click, to start at once."""

from __future__ import annotations

from stepscope.text.words import SITE

WIDEST_HELP = 100
VERBS = {
    "run": "run a training command and explain its steps",
    "explain": "explain a run folder or a trace: where each step's time goes",
    "why": "show what a finding means and what to do about it",
    "demo": "train a small model here and explain it",
    "whatif": "predict what a change would save",
    "tune": "try changes in short runs, keep those that help",
    "compare": "compare two runs: is the difference real?",
    "ab": "run two commands in turns and compare their steps",
    "top": "show a run live in this terminal",
    "hang": "say which rank keeps a job from its next step, and where",
    "serve": "show a folder of runs in a browser",
    "probe": "time the operators of a step one by one on this machine",
    "calibrate": "measure this machine's matmuls, copies and collectives",
    "bench": "run the suite of training workloads",
    "doctor": "check what works on this machine",
    "completion": "print the completion script of a shell",
    "gather": "copy the parts of one job from several hosts into one run folder",
    "lsp": "show what each line of a script costs, in an editor",
    "mcp": "answer the questions of agents and other programs",
    "sweep": "train a model with many settings, several models at a time",
    "gpus": "predict a recorded step on other GPUs, side by side",
    "health": "start a training command, check three steps, stop it",
    "library": "show, export or import the operator times that probes measured",
    "record": "show past predictions beside their results",
}
GROUPS = {
    "Look": ("run", "explain", "why", "demo"),
    "Change": ("whatif", "tune", "compare", "ab"),
    "Watch": ("top", "serve"),
    "More": ("probe", "calibrate", "bench", "doctor"),
}
# Verbs that another verb includes. Their own names keep working.
NEWER = {
    "gpus": "stepscope whatif --gpus",
    "health": "stepscope run --check",
    "library": "stepscope probe show",
    "record": "stepscope whatif --history",
}
ALSO = tuple(verb for verb in VERBS if verb not in NEWER and verb not in sum(GROUPS.values(), ()))
SUMMARY = "Find where each training step's time goes, predict what a change saves, and check it."
_START = """
Start with:
  stepscope demo                      # a small training, explained
  stepscope run -- python train.py    # your own training
  stepscope explain trace.json.gz     # a trace that you have
"""
_OPTIONS = """
Options:
  -V, --version  Show the version.
  -h, --help     Show this help.
"""


def front_page(program: str, width: int) -> str:
    from textwrap import fill, wrap

    usage = f"Usage: {program} "
    words = "[OPTIONS] COMMAND [ARGS]..."
    lines = [
        fill(words, width, initial_indent=usage, subsequent_indent=" " * len(usage)),
        "",
        fill(SUMMARY, width - 2, initial_indent="  ", subsequent_indent="  "),
        _START,
    ]
    first = max(map(len, VERBS)) + 4
    for title, verbs in GROUPS.items():
        lines.append(f"{title}:")
        for verb in verbs:
            start, *rest = wrap(VERBS[verb], width - first)
            lines.append(f"{f'  {verb}':<{first}}{start}")
            lines += [" " * first + line for line in rest]
        lines.append("")
    olds = ", ".join(f"{old} ({new.removeprefix('stepscope ')})" for old, new in NEWER.items())
    also = f"{', '.join(ALSO)}; under older names {olds}."
    lines += ["Also:", fill(also, width - 2, initial_indent="  ", subsequent_indent="  "), _OPTIONS]
    return "\n".join([*lines, f"`stepscope help COMMAND` explains a command. More: {SITE}/\n"])


def print_front_page(program: str) -> None:
    import sys
    from shutil import get_terminal_size

    width = max(min(get_terminal_size().columns, WIDEST_HELP) - 2, 50)
    sys.stdout.write(front_page(program, width))
    sys.stdout.flush()
