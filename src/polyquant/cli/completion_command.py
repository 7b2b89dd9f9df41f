"""polyquant completion"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from polyquant.cli.completing import VARIABLE
from polyquant.cli.terminal import say


@click.command(
    epilog="""\b
Examples:
  polyquant completion bash >> ~/.bashrc
  polyquant completion zsh >> ~/.zshrc
  polyquant completion fish > ~/.config/fish/completions/polyquant.fish""",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands, options, paths, codecs, recipes and formats in SHELL (bash: 4.4 or
    newer).
    """
    from polyquant.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None  # one of the choices
    writer = kind(cli, {}, "polyquant", VARIABLE)
    for line in (writer.source_template % writer.source_vars()).strip("\n").splitlines():
        say(line)
