"""Megatron's indexed data format, written and checked without importing Megatron.

``PREFIX.bin`` holds the tokens of all sequences, ``PREFIX.idx`` says where each one lies:
magic (9 bytes), version (u64), type code (u8), number of sequences (u64), number of document marks (u64), then per
sequence its length (i32) and its byte offset (i64), and the number of sequences before each document mark (i64).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from mindspeed.files.indexed_paths import bin_path, idx_path
from mindspeed.problems import Problem, RunError, advice

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
_TYPES: Final = (np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16)
TYPES: Final[dict[int, Any]] = dict(enumerate(_TYPES, start=1))
"""Type codes of the format."""
SMALL_VOCABULARY: Final = 65500
"""Up to here tokens are stored in 16 bits, as Megatron's own tools do."""
_HEADER: Final = struct.Struct("<9sQBQQ")


@dataclass(frozen=True, slots=True)
class Index:
    """Hold the content of an index file: the type of a token and the length of every sequence."""

    prefix: str
    dtype: Any
    lengths: npt.NDArray[np.int32]

    @property
    def tokens(self) -> int:
        """Number of tokens in all sequences."""
        return int(self.lengths.sum(dtype=np.int64))

    def read(self, first: int, last: int) -> npt.NDArray[Any]:
        """Tokens of the sequences ``first`` up to, not including, ``last``: a memory map."""
        start, count = (int(part.sum(dtype=np.int64)) for part in (self.lengths[:first], self.lengths[first:last]))
        size = np.dtype(self.dtype).itemsize
        return np.memmap(bin_path(self.prefix), self.dtype, "r", start * size, (count,))


def read_index(prefix: str) -> Index:
    """Read and check an index and the size of its data. Raises RunError with MS601 that describes the damage."""
    path = idx_path(prefix)
    missing = [str(file) for file in (path, bin_path(prefix)) if not file.is_file()]
    if missing:
        fix = "mindspeed data prepare INPUT... -o PREFIX creates both files"
        raise RunError([Problem("MS601", f"there is no {' and no '.join(missing)}", where=f"data {prefix}", fix=advice(fix))])
    content = path.read_bytes()
    if not content.startswith(MAGIC):
        raise _damaged(path, "the file is not an index of Megatron's indexed format, because it starts differently")
    if len(content) < _HEADER.size:
        raise _damaged(path, f"the file ends after {len(content)} bytes, inside its header")
    _, version, code, sequences, documents = _HEADER.unpack_from(content)
    if version != VERSION or code not in TYPES:
        raise _damaged(path, f"the file has version {version} and type code {code}, which are unknown")
    expected = _HEADER.size + sequences * (4 + 8) + documents * 8
    if len(content) < expected:
        raise _damaged(path, f"the file has {len(content)} bytes, but its {sequences} sequences need {expected}")
    index = Index(prefix, TYPES[code], np.frombuffer(content, np.int32, sequences, _HEADER.size))
    size = bin_path(prefix).stat().st_size
    needed = index.tokens * np.dtype(index.dtype).itemsize
    if size != needed or (sequences and int(index.lengths.min()) < 0):
        raise _damaged(bin_path(prefix), f"the file has {size} bytes, but the index describes {needed}")
    return index


def write_indexed(prefix: str, documents: Iterable[Iterable[npt.NDArray[Any]]], vocab_size: int) -> Index:
    """Write documents, each given as its sequences, and return their index. Both files appear only when complete."""
    dtype = np.uint16 if vocab_size <= SMALL_VOCABULARY else np.int32
    lengths: list[int] = []
    marks = [0]
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    parts = [Path(f"{path}.{os.getpid()}.partial") for path in (bin_path(prefix), idx_path(prefix))]
    try:
        with parts[0].open("wb") as data:
            for document in documents:
                for sequence in document:
                    data.write(np.asarray(sequence, dtype).tobytes())
                    lengths.append(len(sequence))
                marks.append(len(lengths))
        with parts[1].open("wb") as file:
            _write_index(file, dtype, lengths, marks)
        parts[0].replace(bin_path(prefix))
        parts[1].replace(idx_path(prefix))
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    return Index(prefix, dtype, np.array(lengths, np.int32))


def _write_index(file: BinaryIO, dtype: Any, lengths: list[int], marks: list[int]) -> None:
    code = next(code for code, known in TYPES.items() if known is dtype)
    file.write(_HEADER.pack(MAGIC, VERSION, code, len(lengths), len(marks)))
    sizes = np.array(lengths, np.int32)
    file.write(sizes.tobytes())
    ends = np.cumsum(sizes, dtype=np.int64)
    file.write(((ends - sizes) * np.dtype(dtype).itemsize).tobytes())
    file.write(np.array(marks, np.int64).tobytes())


def _damaged(path: Path, what: str) -> RunError:
    fix = "create it again with mindspeed data prepare, or copy it again from its source"
    return RunError([Problem("MS601", f"{path} cannot be read: {what}", where=str(path), fix=advice(fix))])
