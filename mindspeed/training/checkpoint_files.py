"""Check the files of a checkpoint: sizes without torch, contents by the checksums that torch writes and does not read."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

ESSENTIAL: Final = ("metadata.json", "common.pt", ".metadata")
"""Files without which Megatron loads no checkpoint."""
_UNREADABLE: Final = (
    *(OSError, ValueError, EOFError, LookupError, TypeError, AttributeError, ImportError),
    *(zipfile.BadZipFile, pickle.UnpicklingError),
)
"""Errors that reading damaged archives and pickles raises."""


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of every file of a checkpoint folder, by name."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}


def missing_and_cut(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """Return a sentence for each file that is missing, or has another size than was recorded; opens no file."""
    here = file_sizes(folder)
    missing = [f"{name} is missing" for name in dict.fromkeys([*ESSENTIAL, *sizes]) if name not in here]
    cut = [f"{name} has {here[name]} bytes of {size}" for name, size in sizes.items() if name in here and here[name] != size]
    return missing + cut


def damages(folder: Path, part: int = 0, parts: int = 1) -> Iterator[str]:
    """Yield a sentence for each damaged file or tensor, reading every byte and comparing checksums.

    With ``parts``, only the share of number ``part`` of the tensors is read, so that ranks can divide the work.
    """
    for name in ("metadata.json", "mindspeed.json", "features.json", "plan.json"):
        if (folder / name).is_file() and (reason := _json_damage(folder / name)):
            yield reason
    if reason := _archive_damage((folder / "common.pt").read_bytes):
        yield f"common.pt {reason}"
    try:
        items = sorted(_stored_items(folder), key=lambda item: item[1:])
    except _UNREADABLE as error:
        yield f".metadata cannot be read: {_reason(error)}"
        return
    for key, name, offset, length in items[part::parts]:
        if reason := _archive_damage(lambda path=folder / name, start=offset, size=length: _read(path, start, size)):
            yield f"{name}: {key} {reason}"


def _stored_items(folder: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yield key, file, offset and length of every tensor and object, as the checkpoint's index has them."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    index: Any = FileSystemReader(folder).read_metadata()
    for item, stored in index.storage_data.items():
        yield item.fqn, stored.relative_path, stored.offset, stored.length


def _read(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(length)
    if len(content) < length:
        raise EOFError(f"the file ends after {len(content)} of its {length} bytes")
    return content


def _archive_damage(read: Any) -> str:
    """Return what is wrong with a zip archive of torch, or ''."""
    try:
        with zipfile.ZipFile(io.BytesIO(read())) as archive:
            broken = archive.testzip()
    except _UNREADABLE as error:
        return f"cannot be read: {_reason(error)}"
    return f"has other bytes than were saved, in {broken}" if broken else ""


def _json_damage(path: Path) -> str:
    try:
        json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        return f"{path.name} cannot be read: {_reason(error)}"
    return ""


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "the file is missing"
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text[0].lower() + text[1:]
