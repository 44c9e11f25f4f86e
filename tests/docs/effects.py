"""Numbers that pages of features publish with the command that prints them.

``python -m tests.docs.effects [FEATURE ...]`` runs the commands and prints what they print and which numbers are missing.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from unittest.mock import patch

from click.testing import CliRunner

from mindspeed.workbench.verification.pool import WorkerPool

FEATURES = Path(__file__).parents[2] / "mindspeed" / "features"
MASK = 2048 * 2048
_COMMAND = re.compile(r"`mindspeed (features verify [^`]+)`")
_BYTES = re.compile(r"(?<![\w,.])\d{1,3}(?:,\d{3})+(?![\w,])")
_MEGABYTES = re.compile(r"(?<![\w,.])\d+\.\d+(?= MB\b)")


@dataclass(frozen=True)
class Published:
    """Commands of a paragraph or of a row of a table, and the numbers beside them, as they are written."""

    commands: tuple[str, ...]
    bytes: tuple[str, ...]
    megabytes: tuple[str, ...]

    def missing(self, printed: set[int]) -> list[str]:
        """The numbers that no command has printed; megabytes are rounded, and a thread of gloo may still hold a few scalars."""
        absent = [text for text in self.bytes if not any(isclose(_number(text), n, rel_tol=0.001) for n in printed)]
        rounded = {f"{number / 1e6:.{digits}f}" for number in printed for digits in (1, 2)}
        return absent + [f"{text} MB" for text in self.megabytes if text not in rounded]


def published(feature: str) -> Iterator[Published]:
    """The numbers of a page that stand in a paragraph, or in a row of a table, with a command of ``features verify``."""
    page = FEATURES / feature.replace("-", "_") / "README.md"
    for block in re.split(r"\n\s*\n", page.read_text(encoding="utf-8")):
        for part in _parts(block):
            commands, text = tuple(dict.fromkeys(_COMMAND.findall(part))), _COMMAND.sub("", part)
            numbers = tuple(_BYTES.findall(text)), tuple(_MEGABYTES.findall(text))
            if commands and any(numbers):
                yield Published(commands, *numbers)


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _parts(block: str) -> list[str]:
    """A paragraph in one line; of a table each row, with the header unless the row has a command of its own."""
    if not block.startswith("|"):
        return [" ".join(block.split())]
    header, _, *rows = block.splitlines()
    return [row if _COMMAND.search(row) else header + row for row in rows]


def printed(command: str, pool: WorkerPool) -> set[int]:
    """The bytes that a command of ``features verify`` prints: of every kind, without and with the feature, by formula too.

    Saved activations are also given without the causal mask of `fusion_attention`, which is made once in a process.
    """
    from mindspeed.cli import main

    with patch("mindspeed.workbench.verification.pool.WorkerPool", lambda: nullcontext(pool)):
        result = CliRunner().invoke(main, [*shlex.split(command), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    proof = json.loads(result.stdout)["proof"]
    numbers = {number for kind in ("bytes", "formula") for sizes in proof[kind].values() for number in sizes}
    return numbers | {number - MASK for number in proof["bytes"]["saved activations"]}


def main(names: list[str]) -> None:
    with WorkerPool() as pool:
        for name in names or sorted(folder.name for folder in FEATURES.iterdir() if (folder / "README.md").is_file()):
            for effect in published(name):
                found = {command: printed(command, pool) for command in effect.commands}
                for command, numbers in found.items():
                    print(name, "|", command, "|", sorted(numbers), flush=True)
                if missing := effect.missing(set().union(*found.values())):
                    print(name, "| not printed:", ", ".join(missing), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
