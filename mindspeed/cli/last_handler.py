"""Handler of a command that ends without a problem: how click and Python end one."""

from __future__ import annotations

import signal
from typing import Final

import click

INTERRUPTED: Final = 128 + signal.SIGINT
"""Exit status of a command that Ctrl-C ends, as a shell has it."""


def is_of_click(error: BaseException) -> bool:
    """Return whether an error is how click or Python end a command."""
    return isinstance(error, click.ClickException | click.Abort | click.exceptions.Exit | SystemExit)
