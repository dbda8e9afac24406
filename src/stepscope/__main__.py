"""The command `stepscope`, and python -m stepscope."""

from stepscope.ui.cli.verbs import main as run

__all__ = ["run"]

if __name__ == "__main__":
    run()
