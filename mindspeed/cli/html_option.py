"""The option ``--html FILE`` of verbs that draw what they print."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def html_option(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add ``--html FILE``, which writes ``what`` as a page; the function gets it as ``html``."""
    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option("--html", type=kind, metavar="FILE", help=f"Also write {what} as one HTML page")


def write_page(file: Path, text: str) -> None:
    """Write a page. Raises PlatformError (MS516) for a place that cannot be written."""
    from mindspeed.files.text_files import write_files

    write_files({file: text}, fix="choose another --html FILE")
