"""Libraries of C++ operators for tests: tiny sources that compile in an instant, and records of libraries that never were."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mindspeed.files.cache_folder import make_private
from mindspeed.ops import build_cache
from mindspeed.ops.build_cache import Built, Key
from mindspeed.ops.variants import SOURCES, operator_files

TINY = '#include <cstdio>\n__attribute__((constructor)) static void hello() {{ std::puts("{name} is loaded"); }}\n'


def write_sources(folder: Path, sources: Mapping[str, str] | None = None) -> Path:
    """A folder of sources ``{"cpu/a.cpp": text}``; without any, two that print a line when they are loaded."""
    tiny = {f"cpu/{name}.cpp": TINY.format(name=name) for name in ("first", "second")}
    for name, text in (tiny if sources is None else sources).items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def write_compiler(file: Path, before: str = "", version: str = "acme 1.0") -> Path:
    """A compiler that is g++, calls itself by another version, and first runs a line of shell when it compiles a source."""
    told = f'if [ "$1" = --version ]; then echo "{file.name} {version}"; exit 0; fi'
    file.unlink(missing_ok=True)  # it may be running
    file.write_text(f'#!/bin/sh\n{told}\ncase " $* " in *" -c "*) {before or ":"};; esac\nexec g++ "$@"\n')
    file.chmod(0o755)
    return file


def pretend_built(cache: Path, sources: Path = SOURCES, operators: Sequence[str] | None = None, **other: str) -> Built:
    """A record, in a cache, of a library for this machine that holds nothing; ``other`` replaces parts of its key.

    Without ``operators`` it is said to have those of the sources.
    """
    content = b"no library"
    names = tuple(operators or (file.stem for file in operator_files(sources)))
    key: Key = replace(build_cache.wanted(build_cache.torch_version() or "", sources), **other)
    library = build_cache.place(key, "acme 1.0", cache)
    make_private(library.parent)
    library.write_bytes(content)
    library.chmod(0o700)
    built = Built(library, key, "acme 1.0", names, len(content), 1.0)
    build_cache.write_record(built)
    return built


def run(program: str, cache: Path, sources: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python program that has this cache and these sources."""
    given = {"MINDSPEED_CACHE": str(cache), "MINDSPEED_CSRC": str(sources), "OMP_NUM_THREADS": "1", **variables}
    environment = {**{name: text for name, text in os.environ.items() if name != "MINDSPEED_OPS"}, **given}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
