"""What does the command line cost before it does anything? Whole processes against a bare interpreter."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.table import Row, main, medians

COMMAND = "python -m benchmarks.cli"
LOADED = (
    "import sys; before = set(sys.modules); import mindspeed; "
    "names = {name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names) - {'mindspeed'}; "
    "print(len(names))"
)


def python(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout


def rows() -> list[Row]:
    bare, imported, listed = medians(
        lambda: python("-c", "pass"),
        lambda: python("-c", "import mindspeed"),
        lambda: python("-m", "mindspeed", "features", "list"),
        repeat=15,
    )
    third_parties = int(python("-c", LOADED))
    return [
        Row("import mindspeed over bare Python", 10, (imported - bare) * 1e3, "ms", COMMAND),
        Row("third-party packages that import mindspeed loads", 0, third_parties, "", COMMAND),
        Row("features list, whole process", 0.35, listed, "s", COMMAND),
    ]


if __name__ == "__main__":
    main(rows)
