"""Compiled operators in the cache: what each library was built for, and which one fits this process. Light.

``<cache>/ops/<key>/<compiler>.so`` is a library and ``<compiler>.json`` beside it, written last, its record. The key is
known without a compiler, so that looking for a library takes milliseconds. Loading a library runs it: what another user
could have written there is not loaded.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from mindspeed.files.cache_folder import cache_folder, distrust, untrusted
from mindspeed.files.tables import table_beside
from mindspeed.files.text_files import replace_text
from mindspeed.ops.instruction_sets import SETS, instructions
from mindspeed.ops.variants import SOURCES, digest, sources_digest
from mindspeed.problems import Problem

FLAGS: Final[tuple[str, ...]] = tuple(table_beside(__file__))
"""Flags of every source. A kernel that wants fused multiplication and addition calls it by name."""

_WIDE: Final = {"avx512": SETS["AVX-512"], "avx2": ("avx2", "fma")}
"""Widths of ``at::vec::Vectorized``, best first, with the processor flags that each needs."""


@dataclass(frozen=True, slots=True)
class Key:
    """Identify a library by what it must have in common with the process that loads it."""

    torch: str
    sources: str
    processor: str
    libc: str

    @property
    def folder(self) -> str:
        """The name of the folder with the libraries for it."""
        return digest(*asdict(self).values())


@dataclass(frozen=True, slots=True)
class Built:
    """A library in the cache; ``size`` in bytes, ``seconds`` that compiling took."""

    library: Path
    key: Key
    compiler: str
    operators: tuple[str, ...]
    size: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"library": str(self.library)}


def wanted(torch: str, sources: Path = SOURCES) -> Key:
    """The key of the library that this process would load, for this version of torch."""
    return Key(
        torch, digest(*FLAGS, sources_digest(sources)), processor(), os.confstr("CS_GNU_LIBC_VERSION") or platform.system()
    )


def find(key: Key, cache: Path | None = None) -> Built | None:
    """The library for ``key`` that was built last, or None."""
    files = sorted((_root(cache) / key.folder).glob("*.json"), key=lambda file: file.stat().st_mtime)
    return next((built for file in reversed(files) if (built := read(file)) is not None), None)


def others(key: Key, cache: Path | None = None) -> list[Built]:
    """Libraries in the cache that were built for something else than ``key``."""
    found = [read(file) for file in sorted(_root(cache).glob("*/*.json"))]
    return [built for built in found if built is not None and built.key != key]


def why_not(key: Key, other: Built) -> str:
    """Give the reason why a process with this key cannot load the other library: "built for torch 2.12.0, here is 2.13.0"."""
    if other.key.torch != key.torch:
        return f"the library was built for torch {other.key.torch}, but the process uses {key.torch}"
    if other.key.processor != key.processor:
        return f"the library was built for another processor ({_name(other.key.processor)}), not {_name(key.processor)}"
    if other.key.libc != key.libc:
        return f"the library was built for {other.key.libc}, but the machine has {key.libc}"
    return "the library was built from other sources"


def nearest(key: Key, cache: Path | None = None) -> Built | None:
    """Of the libraries that do not fit, the one that differs least."""
    score = {"torch": 1, "processor": 2, "libc": 4}

    def alike(built: Built) -> int:
        return sum(weight for name, weight in score.items() if getattr(built.key, name) == getattr(key, name))

    return max(others(key, cache), key=alike, default=None)


def place(key: Key, compiler: str, cache: Path | None = None) -> Path:
    """The file that a library for ``key`` made by this compiler has."""
    return _root(cache) / key.folder / f"{digest(compiler)}.so"


def objects(cache: Path | None = None) -> Path:
    """The folder of compiled sources, which libraries of several versions share."""
    return _root(cache) / "objects"


def record_of(library: Path) -> Path:
    """The record that belongs to a library."""
    return library.with_suffix(".json")


def write_record(built: Built) -> None:
    """Make the library one that is found: this is the last step of a build, and atomic."""
    text = json.dumps(built.to_json() | {"library": built.library.name}, indent=2) + "\n"
    replace_text(record_of(built.library), text, private=True)


def read(record: Path) -> Built | None:
    """A trusted record whose library is complete and trusted too; None for another one."""
    if _distrusted(record) is not None:
        return None
    try:
        data = json.loads(record.read_text(encoding="utf-8"))
        library = record.parent / data.pop("library")
        built = Built(library, Key(**data.pop("key")), operators=tuple(data.pop("operators")), **data)
        return built if library.stat().st_size == built.size else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def not_trusted(key: Key, cache: Path | None = None) -> Problem | None:
    """MS518 for what the cache has for ``key`` and this process does not load, since others could have written it."""
    folder = _root(cache) / key.folder
    if (problem := distrust(folder, folder.parents[1])) is not None:
        return problem
    return next((problem for file in sorted(folder.glob("*.json")) if (problem := _distrusted(file)) is not None), None)


def _distrusted(record: Path) -> Problem | None:
    """MS518 for a record, its library or a folder of theirs that others could have written, or a library elsewhere."""
    cache = record.parents[2]
    if (problem := distrust(record, cache)) is not None:
        return problem
    try:
        name = json.loads(record.read_text(encoding="utf-8"))["library"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if Path(str(name)).name != name or name in ("", ".."):
        return untrusted(f"{record} names {name!r}, which is not a file in the same folder", f"rm {shlex.quote(str(record))}")
    return distrust(record.parent / name, cache)


def torch_version() -> str | None:
    """The version in torch's own file, with its local part, without importing torch; None when it is not installed."""
    folder = torch_folder()
    try:
        text = (folder / "version.py").read_text(encoding="utf-8") if folder is not None else ""
    except OSError:
        return None
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    return found[1] if found else None


def torch_folder() -> Path | None:
    """Find the folder of torch without importing it."""
    spec = find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def processor() -> str:
    """Architecture, width of vectors and a hash of the instruction set, as in ``x86_64 avx512 0f3c...``."""
    return f"{platform.machine()} {width() or 'default'} {digest(*sorted(instructions()))}"


def width() -> str | None:
    """``avx512``, ``avx2``, or None when torch's headers choose themselves."""
    flags = instructions()
    return next((name for name, needed in _WIDE.items() if flags.issuperset(needed)), None)


def _name(processor: str) -> str:
    """The readable part of `processor`."""
    return processor.rpartition(" ")[0]


def _root(cache: Path | None) -> Path:
    return (cache or cache_folder()) / "ops"
