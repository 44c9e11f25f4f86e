"""Copies of checkpoints in object storage, by fsspec, and the packages that further places of checkpoints need. Light."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from filelock import FileLock

from mindspeed.problems import Fix, Problem
from mindspeed.workbench.training.checkpoints import (
    FOLDER,
    MANIFEST,
    REQUEST,
    checkpoint_path,
    is_complete,
    newest_complete,
    partial_path,
    read_manifest,
    step_of,
)
from mindspeed.workbench.training.config import TrainConfig

LOCAL_PACKAGE: Final = "nvidia-resiliency-ext"


def storage_problems(config: TrainConfig) -> list[Problem]:
    """Return MS501 for packages that further places of checkpoints need, and MS301 for a remote folder that is no URL."""
    problems = []
    if config.local_save is not None and find_spec("nvidia_resiliency_ext") is None:
        problems.append(_missing("local_save", LOCAL_PACKAGE))
    if config.remote is not None:
        problems += _remote_problems(config.remote)
    return problems


def _remote_problems(url: str) -> list[Problem]:
    protocol, separator, _ = url.partition("://")
    if separator and find_spec("fsspec") is None:
        return [_missing("remote", "fsspec")]
    if separator:
        from fsspec.registry import get_filesystem_class, known_implementations

        try:
            get_filesystem_class(protocol)
            return []
        except ImportError:
            module = known_implementations[protocol]["class"].partition(".")[0]
            return [_missing("remote", module if module != "fsspec" else f"fsspec[{protocol}]")]
        except ValueError:
            pass
    text = f"train.remote is {url!r}: it does not begin with a protocol that fsspec knows, such as s3://"
    return [Problem("MS301", text, fix=Fix.give_option("--remote", "s3://bucket/job"))]


def _missing(field: str, package: str) -> Problem:
    text = f"train.{field} needs the package {package}, which is not installed on this machine"
    return Problem("MS501", text, fix=(Fix.run_command(f"pip install '{package}'"),))


class RemoteFolder:
    """The checkpoints of a run in object storage. A complete checkpoint has its manifest, which is copied last."""

    def __init__(self, url: str) -> None:
        import fsspec

        self._files: Any
        self._files, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, oldest first."""
        self._files.invalidate_cache()
        found = self._files.glob(f"{self._root}/step-*/{MANIFEST}")
        return sorted(step_of(Path(path).parent) for path in found)

    def put(self, checkpoint: Path, keep: int) -> None:
        """Copy a checkpoint, and remove all but the ``keep`` newest ones."""
        folder = f"{self._root}/{checkpoint.name}"
        self._files.makedirs(folder, exist_ok=True)
        names = [path.name for path in checkpoint.iterdir() if path.name != MANIFEST]
        self._files.put([str(checkpoint / name) for name in names], [f"{folder}/{name}" for name in names])
        self._files.put_file(str(checkpoint / MANIFEST), f"{folder}/{MANIFEST}")
        for step in self.steps()[:-keep]:
            old = f"{self._root}/{checkpoint_path('', step).name}"
            self._files.rm_file(f"{old}/{MANIFEST}")
            self._files.rm(old, recursive=True)

    def get(self, step: int, run: Path) -> None:
        """Copy a checkpoint into a run folder, and the job file of the run if it is missing there.

        Raises RunError with MS602 for a copy without all its files.
        """
        path = checkpoint_path(run, step)
        partial = partial_path(path)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        names = [Path(name).name for name in self._files.ls(f"{self._root}/{path.name}", detail=False)]
        self._files.get([f"{self._root}/{path.name}/{name}" for name in names], [str(partial / name) for name in names])
        read_manifest(partial)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        if not (run / REQUEST).exists():
            shutil.copyfile(path / REQUEST, run / REQUEST)


def fetch_newest(run: str, config: TrainConfig) -> None:
    """Copy the newest checkpoint of object storage into a run folder without one as new; one process copies for all.

    Nothing is copied where `storage_problems` refuses the job.
    """
    if config.remote is None or storage_problems(config):
        return
    remote = RemoteFolder(config.remote)
    step = next(reversed(remote.steps()), 0)
    if step <= (newest_complete(run) or 0):
        return
    (Path(run) / FOLDER).mkdir(parents=True, exist_ok=True)
    with FileLock(Path(run) / ".fetch.lock"):
        if not is_complete(checkpoint_path(run, step)):
            remote.get(step, Path(run))


class RemoteCopies:
    """Copy checkpoints of a run during training, one at a time. An error is reported, and does not end the run."""

    def __init__(self, url: str, keep: int, report: Callable[[str], None]) -> None:
        self._url, self._keep, self._report = url, keep, report
        self._executor = ThreadPoolExecutor(1, "mindspeed-remote")
        self._copy: Future[None] | None = None

    def add(self, checkpoint: Path) -> None:
        """Begin to copy a checkpoint."""
        self.finish()
        self._copy = self._executor.submit(self._put, checkpoint)

    def finish(self) -> None:
        """Wait for the copy that has begun."""
        if self._copy is not None:
            self._copy.result()
            self._copy = None

    def _put(self, checkpoint: Path) -> None:
        try:
            RemoteFolder(self._url).put(checkpoint, self._keep)
        except Exception as error:  # of any storage and its client
            self._report(f"{checkpoint} is complete, but cannot be copied to {self._url}: {type(error).__name__}: {error}")
