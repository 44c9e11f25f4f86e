"""What commands print, in documents: ``python -m tests.transcripts`` writes it between the marks.

``<!-- transcript: mindspeed features check a --tp 2 -->``, a block of text, ``<!-- end -->``. Only commands of mindspeed
that ask and start nothing are run here; ``make train`` in the README was copied by hand.
"""

import os
import re
import shlex
from pathlib import Path
from typing import Final

from click.testing import CliRunner

ROOT: Final = Path(__file__).resolve().parents[1]
_MARKED: Final = re.compile(r"(<!-- transcript: mindspeed (.*?) -->\n```\n)(.*?)(```\n<!-- end -->)", re.DOTALL)


def refreshed(text: str) -> str:
    """The document with every transcript as it is now. Commands run in the root of the repository."""
    return _MARKED.sub(lambda found: found[1] + printed(found[2]) + found[4], text)


def printed(command: str) -> str:
    """What ``mindspeed COMMAND`` prints, both streams as they come, without digests: each installation has its own."""
    from mindspeed.cli import main

    quiet: dict[str, str | None] = {name: None for name in os.environ if name.startswith("MINDSPEED_") or name == "WORLD_SIZE"}
    quiet["COLUMNS"] = "80"
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        output = CliRunner().invoke(main, shlex.split(command), env=quiet, catch_exceptions=False).output
        return re.sub(r"\b[0-9a-f]{32}\b", "(digest)", output)
    finally:
        os.chdir(before)


def documents() -> list[Path]:
    """Every document that may hold transcripts."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


if __name__ == "__main__":
    for document in documents():
        old = document.read_text(encoding="utf-8")
        if (new := refreshed(old)) != old:
            document.write_text(new, encoding="utf-8")
