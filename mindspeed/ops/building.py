"""Compile the C++ operators ahead of time, into one library in the cache: ``mindspeed ops build``.

Processes that build the same library at once wait for one another with a lock of the kernel's, which goes when its
holder does, however that ended. The library and its record appear under their names in one step each.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Final

from filelock import FileLock, Timeout

from mindspeed.files.cache_folder import distrust, make_private
from mindspeed.ops import build_cache, speeds
from mindspeed.ops.build_cache import Built, Key
from mindspeed.ops.compiler import CANDIDATES, Compiler, CompilerResult, compile_object, find_compiler, link, run
from mindspeed.ops.instruction_sets import missing
from mindspeed.ops.speeds import MEASURED, Speed
from mindspeed.ops.variants import SOURCES, digest, operator_files, source_digest, source_files
from mindspeed.problems import Fix, PlatformError, Problem, advice

Say = Callable[[str], None]

POLL: Final = 0.5
"""Seconds between two looks at a lock that another process holds."""

_UNWRITABLE: Final = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT),
    *(errno.ENOTDIR, errno.ENOENT, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
)
_LOADS: Final = "import sys, torch; torch.ops.load_library(sys.argv[1])"
_KEPT: Final = 30 * 86400
"""Seconds that an object is kept after its last use."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Describe a library to be built: its key, sources, compiler and place."""

    key: Key
    sources: Path
    compiler: Compiler
    library: Path
    objects: Path
    say: Say
    again: bool

    @property
    def log(self) -> Path:
        return self.library.with_suffix(".log")


def build(say: Say, force: bool = False, sources: Path = SOURCES, cache: Path | None = None) -> tuple[Built, bool]:
    """The library of all ``sources``, and whether it was compiled now; else it was in the cache.

    ``say`` takes one line for each step.

    Raises PlatformError: MS501 without torch, MS510 without a compiler, MS511 when a source does not compile, MS514 when
    the cache cannot be written, MS518 when others could write it too.
    """
    version = build_cache.torch_version()
    if version is None:
        text = "torch is not installed, but the operators are compiled against it"
        raise PlatformError([Problem("MS501", text, fix=Fix.run_command("pip install 'mindspeed[train]'"))])
    key = build_cache.wanted(version, sources)
    compiler = find_compiler(os.environ.get("CXX"))
    if (done := _already(key, compiler, force, cache)) is not None:
        return done, False
    if compiler is None:
        raise PlatformError([_no_compiler()])
    library = build_cache.place(key, compiler.version, cache)
    job = _Job(key, sources, compiler, library, build_cache.objects(cache), say, force)
    with _writable(library.parent):
        make_private(library.parent)
        make_private(job.objects)
        _require_trust(job)
        with _lock(library, say):
            # whoever was waited for may have built it
            done = _already(key, compiler, force, cache)
            return (done, False) if done is not None else (_make(job), True)


def measured(built: Built, say: Say, again: bool = False) -> tuple[Speed, ...]:
    """Return the times of a library's operators on this processor; they are measured now unless all of them are known.

    Raises PlatformError: MS512 when an operator fails, MS514 when the cache cannot be written.
    """
    if (known := _known(built, again)) is not None:
        return known
    with _writable(built.library.parent), _lock(built.library, say):
        if (known := _known(built, again)) is not None:  # the process that held the lock has measured
            return known
        rows = _measure(built)
        speeds.write(built.library, rows)
        return rows


def _known(built: Built, again: bool) -> tuple[Speed, ...] | None:
    """Return the stored times of a library, or None where one of them is missing or all are measured again."""
    needed = {(op, *case) for op in built.operators if op in MEASURED for case in speeds.cases(op)}
    known = () if again else speeds.read(built.library)
    return known if needed.issubset((speed.op, speed.dtype, speed.small) for speed in known) else None


def _measure(built: Built) -> tuple[Speed, ...]:
    """Measure a library's operators in a separate process. Called with the lock held: others would change the times."""
    environ = {name: value for name, value in os.environ.items() if name != "MINDSPEED_OPS"}
    command = [sys.executable, "-m", "mindspeed.ops.measuring"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode != 0:
        last = (done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1]
        text = f"the C++ operators cannot be measured: {last}"
        fix = advice("mindspeed ops build --force compiles them again; MINDSPEED_OPS=reference trains without them")
        raise PlatformError([Problem("MS512", text, where=str(built.library), fix=fix)])
    return tuple(Speed(**row) for row in json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Raise MS514 where the folder of a library cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        text = f"the folder of built operators is not writable: {error.strerror}"
        fix = "MINDSPEED_CACHE=FOLDER mindspeed ops build, and set the same variable for training"
        raise PlatformError([Problem("MS514", text, where=str(folder), fix=advice(fix))]) from error


def _require_trust(job: _Job) -> None:
    """Raise MS518 where another user could put a library or an object into the cache."""
    cache = job.objects.parents[1]
    if problem := distrust(job.library.parent, cache) or distrust(job.objects, cache):
        raise PlatformError([problem])


def _already(key: Key, compiler: Compiler | None, force: bool, cache: Path | None) -> Built | None:
    """Find the library built for this key, by this compiler if there is one."""
    if force:
        return None
    if compiler is None:
        return build_cache.find(key, cache)
    return build_cache.read(build_cache.record_of(build_cache.place(key, compiler.version, cache)))


def _no_compiler() -> Problem:
    named = os.environ.get("CXX")
    tried = f"CXX is {named!r}, which does not run" if named else f"none of {', '.join(CANDIDATES)} runs"
    text = f"no C++ compiler was found: {tried}; operators use their plain-torch references, which are slower"
    return Problem("MS510", text, fix=Fix.advise("apt-get install g++ (or dnf install gcc-c++), or set CXX"))


def _make(job: _Job) -> Built:
    """Compile, link, try, and only then put in place. Called with the lock held."""
    started = time.perf_counter()
    prefix = f"building-{job.library.stem}-"  # the lock is this library's, and so is what was left behind
    for left_behind in job.library.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_behind, ignore_errors=True)
    folder = Path(mkdtemp(prefix=prefix, dir=job.library.parent))
    try:
        parts = _compile(job, [file for file in source_files(job.sources) if not missing(file.stem)], folder)
        draft = folder / job.library.name
        _require(job, {"the library": link(job.compiler, parts, draft)}, "be linked")
        _require(job, {"the library": run([sys.executable, "-c", _LOADS, str(draft)])}, "be loaded")
        draft.chmod(0o700)
        size = draft.stat().st_size
        os.replace(draft, job.library)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = round(time.perf_counter() - started, 1)
    operators = tuple(file.stem for file in operator_files(job.sources) if not missing(file.stem))
    built = Built(job.library, job.key, job.compiler.version, operators, size, seconds)
    build_cache.write_record(built)
    job.log.unlink(missing_ok=True)
    return built


def _compile(job: _Job, files: list[Path], folder: Path) -> list[Path]:
    """Compile one object per source, in parallel; objects of unchanged sources are reused."""
    common = digest(*build_cache.FLAGS, job.key.torch, job.key.processor, job.compiler.version)
    made = [job.objects / f"{digest(common, source_digest(file))}.o" for file in files]
    pending = {file: part for file, part in zip(files, made, strict=True) if job.again or not _usable(part)}
    if pending:
        job.say(f"compiling {len(pending)} of {len(files)} sources, once for this machine")

    def compile_one(source: Path, part: Path) -> CompilerResult:
        started = time.perf_counter()
        draft = folder / part.name
        outcome = compile_object(job.compiler, source, job.sources / "common", draft)
        if outcome.status == 0:
            draft.chmod(0o600)
            os.replace(draft, part)
            job.say(f"{source.name} compiled in {time.perf_counter() - started:.0f} s\n{outcome.output}".strip())
        return outcome

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = dict(zip(pending, pool.map(compile_one, pending, pending.values()), strict=True))
    _require(job, {file.name: outcome for file, outcome in outcomes.items()}, "be compiled")
    _forget(job.objects, made)
    return made


def _usable(part: Path) -> bool:
    """Return whether an object is there, and no other user could have written it."""
    return part.is_file() and distrust(part, part.parents[2]) is None


def _forget(folder: Path, used: list[Path]) -> None:
    """Remove objects that nothing has used for long."""
    for part in used:
        os.utime(part)
    for part in folder.glob("*.o"):
        if time.time() - part.stat().st_mtime > _KEPT:
            part.unlink(missing_ok=True)


def _require(job: _Job, outcomes: Mapping[str, CompilerResult], what: str) -> None:
    """Raise MS511 with the first errors of the commands that failed, and write all their output into the log."""
    failed = {name: outcome for name, outcome in outcomes.items() if outcome.status != 0}
    if not failed:
        return
    job.log.write_text("\n".join(f"$ {' '.join(each.command)}\n{each.output}" for each in failed.values()), encoding="utf-8")
    errors = tuple(line for outcome in failed.values() for line in outcome.errors()[:3])
    text = f"{', '.join(failed)} cannot {what} with {job.compiler.command[0]} {job.compiler.version}"
    fix = "read the log; if mindspeed is unchanged, report it or set CXX to another compiler"
    raise PlatformError([Problem("MS511", text, chain=errors, where=str(job.log), fix=advice(fix))])


@contextmanager
def _lock(library: Path, say: Say) -> Iterator[None]:
    """Hold the lock of this library; while another process does, report which one."""
    lock = FileLock(library.with_suffix(".lock"))
    holder = library.with_suffix(".holder")
    reported = ""
    while not lock.is_locked:
        try:
            lock.acquire(timeout=POLL, poll_interval=POLL / 5)
        except Timeout:
            if (who := _holder(holder)) != reported:
                say(f"waiting for {who}")
                reported = who
    try:
        mine = {"pid": os.getpid(), "host": os.uname().nodename, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        holder.write_text(json.dumps(mine), encoding="utf-8")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _holder(file: Path) -> str:
    """Describe the process that builds."""
    try:
        who = json.loads(file.read_text(encoding="utf-8"))
        return f"process {who['pid']} on {who['host']}, building since {who['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process, which is building"
