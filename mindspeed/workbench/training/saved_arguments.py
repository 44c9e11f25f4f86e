"""Read Megatron-LM's arguments out of a checkpoint, without torch and without running what the file names."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mindspeed.workbench.training.checkpoints import COMMON

_SAFE: Final[Mapping[tuple[str, str], type]] = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
}


class Unread:
    """Replace an object whose class was not called; it prints as the class and its arguments."""

    name = "object"

    def __init__(self, *arguments: Any, **_: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None:
        """Take an element of a list."""

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.arguments))})"


class _Reader(pickle.Unpickler):
    """Read plain data; classes and functions other than those of `_SAFE` become `Unread`, tensors as well."""

    def find_class(self, module: str, name: str) -> Any:
        return _SAFE.get((module, name)) or type(name, (Unread,), {"name": name})

    def persistent_load(self, key: Any) -> Any:
        return Unread("tensor")


def saved_arguments(folder: Path) -> dict[str, Any] | None:
    """Return the arguments of the run that saved a checkpoint folder; None where the folder does not keep them by themselves.

    Raises one of `checkpoints.UNREADABLE` for a damaged file.
    """
    path = folder / COMMON
    if not path.is_file():
        return None
    with zipfile.ZipFile(path) as archive:
        name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if name is None:
            raise ValueError("data.pkl is missing")
        saved = _Reader(io.BytesIO(archive.read(name))).load()
    arguments = saved.get("args") if isinstance(saved, dict) else None
    return dict(vars(arguments)) if isinstance(arguments, argparse.Namespace) else None
