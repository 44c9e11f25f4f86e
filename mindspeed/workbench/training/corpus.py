"""From text files to indexed data; without any, the text of Python's own standard library."""

from __future__ import annotations

import hashlib
import os
import platform
import random
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from mindspeed.files.cache_folder import CACHE_VARIABLE, cache_folder, make_private, require_trusted
from mindspeed.files.indexed_paths import bin_path, idx_path
from mindspeed.megatron.indexed_data import Index, read_index, write_indexed
from mindspeed.problems import Fix, Problem, RunError, advice
from mindspeed.workbench.training.tokenizer import BYTES, Tokenizer, describe, load_tokenizer

PIECE: Final = 4096
"""Tokens in a sequence. Megatron splits training from held-out data between sequences, so a document has several."""
_LEFT_OUT: Final = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "lib2to3", "__pycache__"}
"""Folders of the standard library that hold tables and tests, much of them nearly equal text."""
_ORDER: Final = 20240229


def prepare(inputs: Sequence[str], prefix: str, tokenizer: str = BYTES, overwrite: bool = False) -> Index:
    """Turn text files, and the text files in folders, into ``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.json``.

    Every file is one document. Raises RunError: MS601 for every input that cannot be read, MS603 for an output that is
    there already, unless ``overwrite`` is given, or that cannot be written.
    """
    files: list[Path] = []
    problems: list[Problem] = []
    if Path(prefix).name in ("", "..") or prefix.endswith(("/", "/.")):
        text = f"the output {prefix!r} contains no file name"
        problems.append(Problem("MS603", text, fix=Fix.advise("-o NAME, or -o FOLDER/NAME")))
    if existing := [str(path) for path in (bin_path(prefix), idx_path(prefix)) if path.exists() and not overwrite]:
        fix = "--overwrite to replace the data, or use another -o"
        problems.append(Problem("MS603", f"data already exists: {', '.join(existing)}", where=prefix, fix=advice(fix)))
    for name in inputs:
        path = Path(name)
        texts = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        files += texts
        if not texts:
            text = f"{name} contains no text" if path.exists() else f"{name} does not exist"
            problems.append(Problem("MS601", text, where=name, fix=Fix.advise("give a text file or a folder")))
    for name in (str(file) for file in files if not os.access(file, os.R_OK)):
        text = f"{name} cannot be read: permission denied"
        problems.append(Problem("MS601", text, where=name, fix=Fix.advise(f"chmod u+r {name}")))
    if problems:
        raise RunError(problems)
    return _write(files, prefix, tokenizer)


def _sources(root: Path) -> Iterator[Path]:
    """The Python files below a folder, without descending into what is left out: packages are installed there."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def standard_library() -> str:
    """The prefix of the prepared text of this Python's standard library; prepared on the first call, once per machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(_sources(root))
    if not files:
        text = f"without --data, the training text is the Python files of the standard library, but {root} contains none"
        raise RunError([Problem("MS601", text, fix=Fix.advise("--data PREFIX of data that mindspeed data prepare created"))])
    random.Random(_ORDER).shuffle(files)
    listing = "".join(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n" for path in files)
    digest = hashlib.blake2b(f"{PIECE} {listing}".encode(), digest_size=6).hexdigest()
    prefix = cache_folder() / f"stdlib-{platform.python_version()}-{digest}"
    require_trusted(Path(bin_path(str(prefix))), Path(idx_path(str(prefix))))
    with suppress(RunError):
        read_index(str(prefix))
        return str(prefix)
    try:
        make_private(prefix.parent)
        with FileLock(f"{prefix}.lock"):
            try:
                read_index(str(prefix))
            except RunError:
                _write(files, str(prefix), BYTES)
    except OSError as error:
        text = f"the folder for prepared data is not writable: {error.strerror}"
        fix = f"{CACHE_VARIABLE}=FOLDER with a writable folder, or --data PREFIX of data that mindspeed data prepare created"
        raise RunError([Problem("MS603", text, where=str(prefix.parent), fix=advice(fix))]) from error
    return str(prefix)


def _write(files: Sequence[Path], prefix: str, source: str) -> Index:
    tokenizer = load_tokenizer(source)
    documents = (_pieces(tokenizer, file.read_bytes()) for file in files)
    try:
        index = write_indexed(prefix, documents, tokenizer.vocab_size)
        describe(prefix, source)
    except OSError as error:
        text = f"{prefix} cannot be written: {error.strerror}"
        raise RunError([Problem("MS603", text, where=prefix, fix=Fix.advise("use a writable -o with enough space"))]) from error
    return index


def _pieces(tokenizer: Tokenizer, text: bytes) -> Iterator[npt.NDArray[Any]]:
    ids = tokenizer.encode(text)
    if tokenizer.eod >= 0:
        ids = np.append(ids, tokenizer.eod)
    for start in range(0, len(ids), PIECE):
        yield ids[start : start + PIECE]
