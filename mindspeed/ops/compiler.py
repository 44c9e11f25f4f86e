"""The C++ compiler of this machine, and the commands that make objects and the library of operators with it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mindspeed.ops.build_cache import FLAGS, torch_folder, width

CANDIDATES: Final = ("g++", "c++", "clang++")
"""Commands that are tried where the variable CXX names none."""

_OPENMP: Final = ("libgomp*.so*", "libiomp5*.so*", "libomp*.so*")


@dataclass(frozen=True, slots=True)
class Compiler:
    """A command that compiles, and its version without its path."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True, slots=True)
class CompilerResult:
    """Hold the result of one command of the compiler."""

    command: tuple[str, ...]
    status: int
    output: str

    def errors(self) -> list[str]:
        """The lines of the output that say what is wrong, or its last one."""
        lines = self.output.strip().splitlines()
        found = [line for line in dict.fromkeys(lines) if re.search(r"(?:error|undefined reference|cannot find)\b", line)]
        return found or lines[-1:] or [f"{self.command[0]} ended with status {self.status}"]


def find_compiler(named: str | None = None) -> Compiler | None:
    """The compiler that CXX names, else the first of g++, c++ and clang++ that runs; None without one."""
    for candidate in (named,) if named else CANDIDATES:
        command = tuple(shlex.split(candidate))
        if command and shutil.which(command[0]) is not None and (version := _version(command)) is not None:
            return Compiler(command, version)
    return None


def _version(command: tuple[str, ...]) -> str | None:
    """``g++ (Debian 12.2.0-14) 12.2.0`` becomes ``(Debian 12.2.0-14) 12.2.0``: compilers begin with their own path."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except OSError:
        return None
    line = done.stdout.partition("\n")[0]
    return line.removeprefix(command[-1]).removeprefix(Path(command[-1]).name).strip() if done.returncode == 0 else None


def compile_object(compiler: Compiler, source: Path, headers: Path, made: Path) -> CompilerResult:
    """Compile one source against torch's headers and ``headers``."""
    return run([*compiler.command, *FLAGS, *_macros(), *includes(), f"-I{headers}", "-c", str(source), "-o", str(made)])


def link(compiler: Compiler, parts: Iterable[Path], made: Path) -> CompilerResult:
    """Make one library, in which nothing may stay undefined, on the OpenMP runtime that torch itself runs on."""
    torch = _torch()
    folder = torch / "lib"
    runtimes = [file for pattern in _OPENMP for place in (folder, torch.parent / "torch.libs") for file in place.glob(pattern)]
    openmp = [str(runtimes[0])] if runtimes else ["-fopenmp"]
    torch_libraries = [f"-L{folder}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath-link,{folder}"]
    return run([*compiler.command, "-shared", *map(str, parts), "-o", str(made), *torch_libraries, *openmp, "-Wl,-z,defs"])


def _macros() -> list[str]:
    """Flags that make ``at::vec::Vectorized`` as wide as this processor can, and strings those of torch."""
    name = (width() or "").upper()
    wide = [f"-DCPU_CAPABILITY={name}", f"-DCPU_CAPABILITY_{name}", f"-DHAVE_{name}_CPU_DEFINITION"] if name else []
    return [*wide, *_string_layout()]


def _string_layout() -> list[str]:
    """The macro for the layout of standard strings that torch itself was compiled with, as its CMake files say."""
    try:
        text = (_torch() / "share" / "cmake" / "Torch" / "TorchConfig.cmake").read_text(encoding="utf-8")
    except OSError:
        return []
    return re.findall(r"-D_GLIBCXX_USE_CXX11_ABI=[01]", text)[:1]


def includes() -> list[str]:
    """torch's headers, as those of the system: their warnings are not ours."""
    include = _torch() / "include"
    return ["-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")]


def _torch() -> Path:
    folder = torch_folder()
    if folder is None:
        raise FileNotFoundError("torch is not installed")
    return folder


def run(command: list[str]) -> CompilerResult:
    """Run a command to its end; its messages are in English."""
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=environment)
    return CompilerResult(tuple(command), done.returncode, done.stdout + done.stderr)
