"""python -m stepscope."""

from stepscope.ui.cli.main import main

if __name__ == "__main__":
    main()
