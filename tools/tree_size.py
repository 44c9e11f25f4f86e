"""Count files and lines of the tree at some revisions: ``python -m tools.tree_size 0.2.0 HEAD`` prints a table.

Lines are those of ``wc``. Import lines are the lines of import statements in the package, as a share of its lines that are
neither empty nor comments nor docstrings.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from statistics import median

SMALL = 50


def sources(revision: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each tracked file; '' for one that is no text."""
    archive = subprocess.run(["git", "archive", revision], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            content = files.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name, content.read().decode("utf-8", "ignore")
            elif member.issym():
                yield member.name, ""


def lines_of(text: str) -> tuple[int, int]:
    """Return the lines of code of a module, and how many of them belong to import statements."""
    tree = ast.parse(text)
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    imports = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    code = [n for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")]
    return len(set(code) - docstrings), len(imports)


def counts(revision: str) -> dict[str, str]:
    """Count a revision."""
    files = dict(sources(revision))
    package = {name: text for name, text in files.items() if name.startswith("mindspeed/") and name.endswith(".py")}
    tests = [text for name, text in files.items() if name.startswith("tests/") and name.endswith(".py")]
    lengths = [text.count("\n") for text in package.values()]
    code, imports = map(sum, zip(*map(lines_of, package.values()), strict=True))
    return {
        "lines of mindspeed/*.py": f"{sum(lengths):,}",
        "files of mindspeed/*.py": f"{len(lengths):,}",
        "median file": f"{median(lengths):.0f}",
        f"files under {SMALL} lines": f"{sum(length < SMALL for length in lengths):,}",
        "import lines": f"{imports / code:.1%}",
        "lines of tests/*.py": f"{sum(text.count(chr(10)) for text in tests):,}",
        "tracked files": f"{len(files):,}",
    }


if __name__ == "__main__":
    columns = {revision: counts(revision) for revision in sys.argv[1:] or ["HEAD"]}
    print("|", *(f" | {revision}" for revision in columns), "|", sep="")
    print("|---" * (len(columns) + 1), "|", sep="")
    for name in next(iter(columns.values())):
        print(f"| {name}", *(f" | {column[name]}" for column in columns.values()), " |", sep="")
