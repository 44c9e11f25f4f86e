"""The error file of torchelastic, in which a process leaves its problems to its launcher."""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from typing import Final

from mindspeed.problems import MindSpeedError
from mindspeed.process.tracing import tracing

ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
"""Environment variable in which torchrun names the file for a process's last words."""
LAUNCHED: Final = "MINDSPEED_LAUNCHED"
"""Environment variable of processes whose launcher prints their last words itself."""


def leave_problems(error: BaseException) -> None:
    """Write why this process ends where its launcher looks; without a launcher do nothing.

    torchrun prints the call stack, which for problems is their text unless the trace is on.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    is_known = isinstance(error, MindSpeedError) and not tracing()
    callstack = str(error) if is_known else "".join(traceback.format_exception(error))
    is_consequence = isinstance(error, MindSpeedError) and all(problem.code == "MS612" for problem in error.problems)
    last_words = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": callstack,
                "timestamp": str(int(time.time()) + is_consequence),  # torchrun calls the earliest one the cause
            },
        },
        "problems": [problem.to_json(error.words) for problem in error.problems] if isinstance(error, MindSpeedError) else [],
    }
    Path(path).write_text(json.dumps(last_words), encoding="utf-8")
