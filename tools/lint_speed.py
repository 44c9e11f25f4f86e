"""Measure ``mindspeed check``: one command, and 300 in a folder.

    python -m tools.lint_speed MEGATRON_LM

writes wall and processor seconds to ``tools/docs/lint_results.json``. Modules are compiled before anything is
measured, as pip does when it installs them.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from shlex import join
from typing import Final

from tools.functional_tests import functional_tests
from tools.lint_results import DENSE, ENVIRON, RECORD, mutations

MANY: Final = 300


def write_scripts(checkout: Path, folder: Path) -> None:
    """Write MANY commands: functional tests of a checkout, wrong ones, and repetitions of an accepted one."""
    texts = []
    for test in functional_tests(checkout):
        exported = "".join(f"export {name}={value}\n" for name, value in test.command.environ)
        launched = f"torchrun --nproc-per-node {test.command.world_size or 8} {test.command.program}"
        texts.append(f"{exported}{launched} {join(word.text for word in test.command.arguments)}\n")
    launch = f"torchrun --nproc-per-node 16 pretrain_gpt.py {DENSE}"
    texts += [f"{launch} {mutation}\n" for mutation in mutations()]
    texts += [f"{launch} --seed {number + 1}\n" for number in range(MANY - len(texts))]
    for number, text in enumerate(texts[:MANY]):
        (folder / f"{number:03}.sh").write_text(text, encoding="utf-8")


def seconds_of_check(words: Sequence[str], cache: Path) -> tuple[float, float]:
    """Return the wall and processor seconds of a check, those of its child included."""
    environ = {**os.environ, **ENVIRON, "PYTHONPYCACHEPREFIX": str(cache)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "mindspeed", "check", "--platform", "cuda", *words]
    subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=False)
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measured(checkout: Path, runs: int = 5) -> dict[str, dict[str, float]]:
    """Return the seconds of the fastest of ``runs`` checks of one command, and of a check of MANY."""
    with tempfile.TemporaryDirectory() as name:
        scripts, cache = Path(name, "scripts"), Path(name, "cache")
        scripts.mkdir()
        write_scripts(checkout, scripts)
        given = ("--checkout", str(checkout))
        one = (*given, "--", "torchrun", "--nproc-per-node", "16", "pretrain_gpt.py", *DENSE.split())
        seconds_of_check(one, cache)
        walls, processor = zip(*(seconds_of_check(one, cache) for _ in range(runs)), strict=True)
        many = seconds_of_check((*given, str(scripts)), cache)
    pairs = {"one": (min(walls), min(processor)), "many": many}
    return {name: {"wall": round(wall, 2), "processor": round(cpu, 2)} for name, (wall, cpu) in pairs.items()}


if __name__ == "__main__":
    record = json.loads(RECORD.read_text(encoding="utf-8")) | {"speed": measured(Path(sys.argv[1]))}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(record["speed"])
