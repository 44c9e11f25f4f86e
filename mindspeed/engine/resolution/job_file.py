"""The reader of job files. Other requests need no YAML, which takes long to import."""

from __future__ import annotations

from pathlib import Path

from mindspeed.engine.resolution.request import JobFile, job_from_data
from mindspeed.files.plain_yaml import SIZE, PlainDataError, read_plain
from mindspeed.problems import Fix, Problem, ResolutionError, advice


def load_job_file(path: str | Path) -> JobFile:
    """Read a job file (YAML). Raises ResolutionError with MS305 for every unreadable part at once."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(SIZE + 1)
    except OSError as error:
        fix = Fix.advise("give the path of a readable job file")
        raise ResolutionError(
            [Problem("MS305", f"the job file cannot be opened: {error}", where=str(path), fix=fix)]
        ) from error
    except UnicodeDecodeError as error:
        fix = Fix.advise("save it in UTF-8")
        raise ResolutionError(
            [Problem("MS305", f"the job file is not text in UTF-8: {error}", where=str(path), fix=fix)]
        ) from error
    return job_from_text(text, str(path))


def job_from_text(text: str, where: str) -> JobFile:
    """Return the job of a text; ``where`` names it in problems. Raises ResolutionError with MS305."""
    repeated: list[tuple[str, int]] = []
    try:
        data = read_plain(text, repeated)
    except PlainDataError as error:
        fix = Fix.advise("write plain YAML: names, numbers, lists and mappings (docs/enabling-features.md)")
        problem = Problem("MS305", f"the job file cannot be read: {error}", where=f"{where}:{error.line}", fix=fix)
        raise ResolutionError([problem]) from error
    if repeated:
        fixes = advice("keep one of them")
        raise ResolutionError(Problem("MS305", found, where=f"{where}:{line}", fix=fixes) for found, line in repeated)
    return job_from_data(data or {}, where)
