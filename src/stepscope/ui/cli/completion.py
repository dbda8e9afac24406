"""stepscope completion: the script that lets a shell complete our words."""

from __future__ import annotations

import click

from stepscope.ui.cli.options import COMPLETE, verb

_SHELLS = ("bash", "zsh", "fish")


@verb(
    "completion",
    examples=(
        ('eval "$(stepscope completion bash)"', "bash: put this line into ~/.bashrc"),
        ('eval "$(stepscope completion zsh)"', "zsh: put this line into ~/.zshrc"),
        (
            "stepscope completion fish > ~/.config/fish/completions/stepscope.fish",
            "fish: run this once",
        ),
    ),
)
@click.argument("shell", type=click.Choice(_SHELLS))
def command(shell: str) -> None:
    """Print the script that lets a shell complete stepscope's commands and options."""
    from click.shell_completion import get_completion_class

    script = get_completion_class(shell)
    assert script is not None
    root = click.get_current_context().find_root()
    click.echo(script(root.command, {}, "stepscope", COMPLETE).source())
