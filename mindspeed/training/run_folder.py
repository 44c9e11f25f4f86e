"""Hold a run folder for one job at a time. Light."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from mindspeed.plugins.problems import Problem, RunError

LOCK: Final = ".lock"
PATIENCE: Final = 2.0
"""Seconds that a job waits for a folder: longer than another one takes to find that the folder is held."""


@contextmanager
def hold_folder(run: str | Path, patience: float = PATIENCE) -> Iterator[None]:
    """Make a run folder and keep other jobs out of it; the system lets go of it when the process ends.

    Raises RunError: MS608 when another job holds it, MS603 when it cannot be made. Where the file system has no locks
    nothing is kept out.
    """
    folder = Path(run)
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(folder / LOCK, timeout=patience))
        except Timeout as error:
            fix = "wait until it has ended, or give another --run FOLDER"
            raise RunError([Problem("MS608", f"another job is running in {folder}", where=str(folder), fix=fix)]) from error
        except NotImplementedError:
            pass
        except OSError as error:
            text = f"the run folder {folder} cannot be written: {error.strerror}"
            raise RunError(
                [Problem("MS603", text, where=str(folder), fix="--run FOLDER, where files can be written")]
            ) from error
        yield


def check_free(run: str | Path) -> None:
    """Raise what `hold_folder` raises, before processes are started that would find it out."""
    with hold_folder(run, patience=0):
        pass
