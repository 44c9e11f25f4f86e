"""What a problem shows of the output of a worker that has ended."""

from pathlib import Path
from typing import Any

import pytest

from mindspeed.workbench.verification.broker import _tail, _Worker

FRAMES = [f"  frame {number}" for number in range(8)]


@pytest.mark.parametrize(
    "cause",
    [
        "RuntimeError: no such group",
        "torch.distributed.DistBackendError: Connection closed by peer",
        "MS606 the loss is not finite",
        "Fatal Python error: Segmentation fault",
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    ],
)
def test_the_line_that_names_the_cause_is_shown_before_the_last_five(tmp_path: Path, cause: str) -> None:
    assert tail(tmp_path, "starting", cause, *FRAMES) == (cause, *FRAMES[-5:])
    assert tail(tmp_path, *FRAMES, cause) == (*FRAMES[-4:], cause)
    assert tail(tmp_path, *FRAMES) == tuple(FRAMES[-5:])
    assert tail(tmp_path, cause) == (cause,)


def tail(folder: Path, *lines: str) -> tuple[str, ...]:
    nothing: Any = None
    log = folder / "worker.log"
    log.write_text("\n".join(lines))
    return _tail(_Worker(nothing, nothing, log))
