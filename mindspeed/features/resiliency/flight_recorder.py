"""The last collective of this rank, from the flight recorder of torch."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

_DUMPS: Final = ("_dump_nccl_trace", "_dump_fr_trace")
"""Functions of torch that return the records of NCCL, and those of all other backends."""

_PYTHON: Final = str(Path(pickle.__file__).parent)
_WRAPPERS: Final = (str(Path(__file__).parents[2] / name) for name in ("platforms", "plugins"))
_LIBRARIES: Final = (str(Path(torch.__file__).parent), *_WRAPPERS)
"""Folders of torch, and of what a platform puts around collectives."""


class Collective(NamedTuple):
    """A collective: its name, its number in its process group, whether this rank waits for it, and the line that called it."""

    name: str
    number: int
    group: str
    pending: bool
    site: str

    def __str__(self) -> str:
        return f"{self.name} number {self.number} of group {self.group}{f', called at {self.site}' if self.site else ''}"


def last_collective() -> Collective | None:
    """Return the oldest collective that has not ended, else the newest one; None where torch has recorded none."""
    entries = sorted(_entries(), key=lambda entry: entry["time_created_ns"])
    if not entries:
        return None
    pending = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    entry = (pending[:1] or entries[-1:])[0]
    number = entry["p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"]
    name, description = entry["process_group"]
    frames = ((frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ()))
    return Collective(entry["profiling_name"], number, description or name, bool(pending), line_of(frames))


def _entries() -> Iterator[dict[str, Any]]:
    backend = torch._C._distributed_c10d
    for name in _DUMPS:
        if (dump := getattr(backend, name, None)) is not None:  # not every torch records collectives of gloo
            yield from pickle.loads(dump(True, True, False)).get("entries", [])


def line_of(frames: Iterable[tuple[str, int, str]]) -> str:
    """Return the innermost line outside of libraries, of frames (file, line, function) that begin with the innermost one."""
    outer = (frame for frame in frames if not _is_library(frame[0]))
    return next((f"{file}:{line} in {function}" for file, line, function in outer), "")


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or (file.startswith(_PYTHON) and "site-packages" not in file)
