"""Check that a feature is imported without torch and megatron, in a process that cannot import them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from mindspeed.conformance.outcome import Outcome
from mindspeed.conformance.subjects import Subject

HEAVY: Final = ("torch", "torch_npu", "megatron", "transformer_engine", "triton", "apex", "flash_attn")
LIMIT: Final = 200.0
"""Milliseconds of CPU time that importing one feature may take, beside what mindspeed itself imports."""

_PROGRAM: Final = """
import importlib, json, sys, time
heavy, *references = json.loads(sys.argv[1])
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in heavy:
            raise ImportError(f"it imports {name}; do that inside the method that needs it")
sys.meta_path.insert(0, Block())
import mindspeed.plugins.api
answers = []
for reference in references:
    start = time.process_time()
    try:
        importlib.import_module(reference.partition(":")[0])
        error = ""
    except Exception as raised:
        error = str(raised) or type(raised).__name__
    answers.append([(time.process_time() - start) * 1e3, error])
print(json.dumps(answers))
"""


def import_cost(subjects: Sequence[Subject]) -> list[Outcome]:
    """Judge the import of each feature: nothing heavy is imported, and the CPU time that it takes."""
    question = json.dumps([HEAVY, *(subject.row.reference for subject in subjects)])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _PROGRAM, question]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:]
        return [Outcome(s.name, "import cost", "failed", "the process ended", tuple(last)) for s in subjects]
    answers = json.loads(done.stdout.splitlines()[-1])
    return [_outcome(subject.name, *answer) for subject, answer in zip(subjects, answers, strict=True)]


def _outcome(name: str, milliseconds: float, error: str) -> Outcome:
    if error:
        return Outcome(name, "import cost", "failed", error)
    if milliseconds > LIMIT:
        return Outcome(name, "import cost", "failed", f"{milliseconds:.0f} ms; {LIMIT:.0f} ms is allowed")
    return Outcome(name, "import cost", "ok", f"{milliseconds:.0f} ms, no torch and no megatron at import")
