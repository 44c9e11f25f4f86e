"""The store of verdicts: a file of JSON lines, to which every finished case is added at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Final

from filelock import FileLock, Timeout

from mindspeed.files.cache_folder import cache_folder, make_private, require_trusted
from mindspeed.problems import Fix, Problem, RunError
from mindspeed.workbench.verification.matrix.reach import Sources
from mindspeed.workbench.verification.matrix.verdicts import CaseResult, key_of, result_from_json

FORMAT: Final = 1
_HEADER: Final = {"format": FORMAT, "what": "verdicts of mindspeed features matrix"}


def default_store() -> Path:
    """The store of this user."""
    return cache_folder() / "matrix.jsonl"


class VerdictStore:
    """Verdicts by the name of their case; the last one of a case counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()

    def read(self) -> dict[str, CaseResult]:
        """Every verdict. A torn last line, of a run that was killed, is none.

        Raises RunError with MS602 for a file of another format, and MS518 for one that other users could have written.
        """
        require_trusted(self.path)
        if not self.path.exists():
            return {}
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        try:
            if whole and json.loads(whole[0]) != _HEADER:
                raise ValueError(f"its first line is not {json.dumps(_HEADER)}")
            results = [result_from_json(json.loads(line)) for line in whole[1:]]
        except (ValueError, LookupError, TypeError) as error:
            text = f"the file of stored test results cannot be read: {type(error).__name__}: {error}"
            fix = Fix.advise("give another file with --store FILE; the unreadable file is not changed")
            raise RunError([Problem("MS602", text, where=str(self.path), fix=fix)]) from error
        return {result.case.name: result for result in results}

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other runs out. Raises RunError with MS608 when one is writing, and MS603 where nothing can be written."""
        try:
            make_private(self.path.parent)
            with FileLock(f"{self.path}.lock", timeout=0):
                self.read()
                self._mend()
                yield
        except Timeout as error:
            text = "another mindspeed command is writing to the same file of test results (--store)"
            fix = Fix.advise(
                "wait until that command (such as mindspeed features matrix run) ends, or use another --store FILE"
            )
            raise RunError([Problem("MS608", text, where=str(self.path), fix=fix)]) from error
        except OSError as error:
            text = f"the file of test results is not writable: {error.strerror}"
            raise RunError(
                [Problem("MS603", text, where=str(self.path), fix=Fix.advise("use another --store FILE"))]
            ) from error

    def add(self, result: CaseResult) -> None:
        """Write a verdict, so that it survives if this process is killed next."""
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result.to_json()) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _mend(self) -> None:
        """Give a new store its first line, and cut a torn last line off."""
        if not self.path.exists() or not self.path.stat().st_size:
            self.path.write_text(json.dumps(_HEADER) + "\n", encoding="utf-8")
            return
        with self.path.open("rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


def is_stale(result: CaseResult, sources: Sources) -> bool:
    """Return whether a source that the case can reach, or a version, is another one than when it was judged.

    A case with a feature, layout or switch that is not there any more is stale too.
    """
    try:
        return result.key != key_of(result, sources)
    except KeyError:
        return True
