"""Hold a run folder for one job at a time, and name what keeps a run from writing there. Light."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from mindspeed.problems import Fix, MindSpeedError, Problem, RunError, advice
from mindspeed.workbench.training.checkpoints import saved_steps

LOCK: Final = ".lock"
PATIENCE: Final = 2.0
"""Seconds that a job waits for a folder: longer than another one takes to find that the folder is held."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Error numbers of a disk, a quota or a file size that is used up, and of a disk that cannot be written."""

_NUMPY_SHORT_WRITE: Final = "requested and"
"""Of "1000 requested and 10 written", which is all that numpy says when it cannot write an array."""


@contextmanager
def hold_folder(run: str | Path, patience: float = PATIENCE) -> Iterator[None]:
    """Make a run folder and keep other jobs out of it; the system lets go of it when the process ends.

    Raises RunError: MS608 when another job holds it, MS603 when it cannot be made. Where the file system has no locks
    nothing is kept out.
    """
    folder = Path(run)
    lock = FileLock(folder / LOCK, timeout=patience)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(NotImplementedError):
            lock.acquire()
    except Timeout as error:
        fix = "wait until that job has ended, or give another --run FOLDER"
        raise RunError([Problem("MS608", f"another job is running in {folder}", where=str(folder), fix=advice(fix))]) from error
    except OSError as error:
        text, fix = f"the run folder {folder} is not writable: {error.strerror}", "--run FOLDER with a writable folder"
        raise RunError([Problem("MS603", text, where=str(folder), fix=advice(fix))]) from error
    try:
        yield
    finally:
        lock.release()


def check_free(run: str | Path) -> None:
    """Raise what `hold_folder` raises, before processes are started that would find it out."""
    with hold_folder(run, patience=0):
        pass


def disk_problem(error: BaseException, run: str) -> Problem | None:
    """Return MS603 when a full disk is behind an error that is no problem yet, else None."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, MindSpeedError):
        if isinstance(cause, OSError) and (cause.errno in _FULL or _NUMPY_SHORT_WRITE in str(cause)):
            steps = saved_steps(run)
            again = f"mindspeed pretrain --resume {run} (continues from step {steps[-1]})" if steps else "start again"
            text = f"{cause.filename or run} cannot be written: {cause.strerror or cause}"
            return Problem("MS603", text, where=run, fix=Fix.advise(f"free some space, then {again}"))
        cause = cause.__cause__ or cause.__context__
    return None
