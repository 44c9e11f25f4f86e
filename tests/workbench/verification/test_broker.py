"""The broker of workers: where it finds mindspeed, and what a problem shows of the output of a worker that has ended."""

import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed.workbench.verification.broker import _tail, _Worker
from mindspeed.workbench.verification.pool import WorkerPool

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


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 always looks into the current folder first")
def test_workers_in_a_checkout_of_mindspeed_use_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mindspeed").mkdir()
    (tmp_path / "mindspeed" / "__init__.py").write_text("raise ImportError('another package')\n")
    monkeypatch.chdir(tmp_path)
    with WorkerPool() as pool:
        assert pool.call(folder_of_mindspeed, 1) == [folder_of_mindspeed()]


def folder_of_mindspeed() -> str:
    import mindspeed

    return str(mindspeed.__file__)


def tail(folder: Path, *lines: str) -> tuple[str, ...]:
    nothing: Any = None
    log = folder / "worker.log"
    log.write_text("\n".join(lines))
    return _tail(_Worker(nothing, nothing, log))
