"""The commands of a page, run one after the other as a reader would.

A page's blocks of ``console`` have commands behind ``$`` and what they print. A command may go on in the next lines behind a
backslash, or have a here-document. ``...`` stands for lines that are left out. Numbers are not compared.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"\b[0-9a-f]{32}\b|[-+]?\d[\d.,:e+-]*", re.IGNORECASE)


@dataclass(frozen=True)
class Step:
    """A command, and the lines that the page shows below it."""

    command: str
    shown: tuple[str, ...]


def steps(page: str) -> Iterator[Step]:
    """Yield the commands of a page in order."""
    for block in _BLOCK.findall(page):
        lines = iter(block.splitlines())
        command: list[str] = []
        shown: list[str] = []
        for line in lines:
            if line.startswith("$ "):
                if command:
                    yield Step("\n".join(command), tuple(shown))
                command, shown = [line[2:]], []
                end = re.search(r"<<'(\w+)'$", line)
                while command[-1].endswith("\\") or (end and command[-1] != end[1]):
                    command.append(next(lines))
            else:
                shown.append(line)
        if command:
            yield Step("\n".join(command), tuple(shown))


def walk(page: Path, folder: Path, env: dict[str, str]) -> list[str]:
    """Run every command of a page in one shell session, from ``folder`` on; return what differs from the page."""
    differences = []
    here = str(folder)
    for step in steps(page.read_text(encoding="utf-8")):
        script = f"cd '{here}' && {{\n{step.command}\n}}; status=$?; pwd > '{folder}/.here'; exit $status"
        done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=900, check=False)
        here = (folder / ".here").read_text().strip()
        printed = {_NUMBER.sub("0", line.rstrip()) for line in (done.stdout + done.stderr).splitlines()}
        missing = [line for line in step.shown if line != "..." and _NUMBER.sub("0", line.rstrip()) not in printed]
        if done.returncode or missing:
            tail = (done.stdout + done.stderr)[-3000:]
            differences.append(f"$ {step.command}\nexit status {done.returncode}, not printed: {missing}\n{tail}")
        if done.returncode:
            break
    return differences
