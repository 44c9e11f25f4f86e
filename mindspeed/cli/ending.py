"""The end of a command: as click and Python end one, interrupted, or with streams that are closed or cannot be written."""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Final

import click

from mindspeed.cli.output import PROBLEMS
from mindspeed.problems import Problem, advice

INTERRUPTED: Final = 128 + signal.SIGINT
"""Exit status of a command that Ctrl-C ends, as a shell has it."""
CLOSED_PIPE: Final = 128 + signal.SIGPIPE
"""Exit status when the reader of a pipe has gone, as a shell has it for a program that SIGPIPE ends."""

_UNWRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def is_of_click(error: BaseException) -> bool:
    """Return whether an error is how click or Python end a command."""
    return isinstance(error, click.ClickException | click.Abort | click.exceptions.Exit | SystemExit)


def open_closed_streams() -> None:
    """Discard output to a stream that was closed before the start, so that no other file takes its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def status_of(error: OSError) -> int | None:
    """Return the exit status for output that cannot be written, and say why; None for another error.

    The error of a write has no file name. Nothing is said where the reader of a pipe has gone.
    """
    if error.filename is not None or error.errno not in (errno.EPIPE, *_UNWRITABLE):
        return None
    _discard_what_is_left()
    if error.errno == errno.EPIPE:
        return CLOSED_PIPE
    text, fix = f"the output cannot be written: {error.strerror}", "write it to a disk with free space"
    print(Problem("MS603", text, fix=advice(fix)), file=sys.stderr)
    return PROBLEMS


def _discard_what_is_left() -> None:
    """Let Python end without a second error where a standard stream still holds text."""
    for number, stream in ((1, sys.__stdout__), (2, sys.__stderr__)):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            discard = os.open(os.devnull, os.O_WRONLY)
            os.dup2(discard, number)
            os.close(discard)
