"""The reader's language: catalogues for gettext, and the help of commands in it."""

from __future__ import annotations

import gettext
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Final

import click

from mindspeed.cli.terminal import compact, spread
from mindspeed.problems import CommandLine, localized, on_command_line

DOMAIN: Final = "mindspeed"
_VARIABLES: Final = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")
_ENGLISH: Final = ("C", "POSIX", "en")


def bind_catalogues() -> None:
    """Let gettext translate this process's texts; for an English reader no catalogue is read.

    gettext reads the language from the first of LANGUAGE, LC_ALL, LC_MESSAGES and LANG that is set. The system need not have
    that locale. Where there is no catalogue, the cache cannot be written, or the output cannot show the language, texts stay
    English.
    """
    languages = next((value for name in _VARIABLES if (value := os.environ.get(name))), "C")
    if not languages.startswith(_ENGLISH):
        with suppress(OSError, UnicodeEncodeError):
            folder = _compiled_catalogues()
            options = gettext.translation(DOMAIN, folder).gettext("Options")
            options.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
            gettext.bindtextdomain(DOMAIN, folder)
            gettext.textdomain(DOMAIN)  # click's own messages are in the same catalogue


def _compiled_catalogues() -> Path:
    """Return the folder of the catalogues in the form that gettext reads, made once. Raises OSError."""
    from hashlib import sha256

    from mindspeed.files.cache_folder import cache_folder, distrust, make_private
    from mindspeed.files.message_catalogue import LOCALE, compiled_catalogue, read_catalogue

    sources = {path.relative_to(LOCALE): path.read_bytes() for path in sorted(LOCALE.glob("*/LC_MESSAGES/*.po"))}
    cache = cache_folder()
    folder = cache / "locale" / sha256(b"".join(sources.values())).hexdigest()[:16]
    if distrust(folder, cache) is not None:
        raise PermissionError(folder)
    for place, source in sources.items():
        catalogue = folder / place.with_suffix(".mo")
        if not catalogue.exists():
            make_private(catalogue.parent)
            draft = catalogue.with_name(f".{catalogue.name}.{os.getpid()}.new")
            draft.write_bytes(compiled_catalogue(read_catalogue(source.decode())))
            draft.replace(catalogue)
    return folder


class _Formatter(click.HelpFormatter):
    """Wrap help by columns, of which a Chinese character has two, and between such characters."""

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        super().__init__(indent_increment, width, max_width)
        self.width -= 1  # for the column that `spread` leaves out at the end of a line

    def write_heading(self, heading: str) -> None:
        self.write(f"{'':>{self.current_indent}}{gettext.gettext('{title}:').format(title=heading)}\n")

    def write_text(self, text: str) -> None:
        super().write_text(spread(text))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        # click keeps its own option --help as it was made first, in whatever language
        super().write_dl([(first, spread(localized(second))) for first, second in rows], col_max, col_spacing)

    def write(self, string: str) -> None:
        super().write(compact(string))


class _Context(click.Context):
    formatter_class = _Formatter


def reader(words: CommandLine = on_command_line) -> CommandLine:
    """Return an audience in the reader's language; the audience itself where no catalogue is bound."""
    return words.in_language(localized) if gettext.textdomain() == DOMAIN else words


def translated(command: click.Command) -> click.Command:
    """Return a copy of a command with its help in the reader's language; the command itself where no catalogue is bound."""
    if gettext.textdomain() != DOMAIN:
        return command
    command = copy(command)
    command.context_class = _Context
    paragraphs = list(map(localized, help_paragraphs(command)))
    short = localized(command.short_help) if command.short_help else next(iter(paragraphs), "")
    command.short_help = short.rstrip("。")
    command.help, command.epilog = "\n\n".join(paragraphs), localized(command.epilog or "")
    command.params = list(map(copy, command.params))
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.help:
            parameter.help = localized(parameter.help)
    return command


def help_paragraphs(command: click.Command) -> list[str]:
    """Return the paragraphs of a command's help, each on one line; one that must not be wrapped is as it is."""
    paragraphs = (command.help or "").split("\n\n")
    return [text if "\b" in text else " ".join(text.split()) for text in paragraphs if text.strip()]
