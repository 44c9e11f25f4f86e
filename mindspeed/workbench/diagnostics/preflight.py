"""Can this node run a locked job? One check per subject, without torch here and without any other node."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from mindspeed.engine.inspection.megatron_copies import megatron_copies, mixed_roots, package_root
from mindspeed.engine.planning.fingerprint import Content, describe, kind_of, numeric_variables
from mindspeed.engine.planning.lock import Lock, differing, locked_value
from mindspeed.engine.runtime.launch import SAVING_TIME
from mindspeed.problems import MindSpeedError, Problem, advice
from mindspeed.workbench.diagnostics.doctor import probe

GIB: Final = 2**30
INT32: Final = 2**31 - 1
SHARED_MEMORY: Final = Path("/dev/shm")
LOCKED: Final = "MS618"
"""Code of a node that differs from the lock; every other check has a code of the environment."""

SHOWN: Final = 12
"""Differences of one kind that are listed at most."""
_GROUPS: Final = {"source": "patch-contents", "target": "megatron-contents", "version": "", "operator": "", "variable": ""}
_OPERATORS_FIX: Final = "mindspeed ops build, or install the missing packages; see mindspeed ops list"
_SAME_PACKAGES: Final = "install the packages that the lock file was made with, or lock the job again"

YOUNG: Final = 10.0
"""Seconds in which a lock without a known holder may belong to one that has just started."""


@dataclass(frozen=True, slots=True)
class PreflightCheck:
    """Describe a line of the report; ``code`` is that of its problem when it has not passed."""

    name: str
    passed: bool
    found: str
    wanted: str
    fix: str = ""
    code: str = LOCKED

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self) | {"fix": "" if self.passed else self.fix}
        return {name: value for name, value in fields.items() if name != "code"}

    def __str__(self) -> str:
        """Say in one line what differs, which side has what, and what to do."""
        if self.passed:
            return f"pass  {self.name:<22} {self.found}"
        sides = f"this node has {self.found}, but the lock file has" if self.code == LOCKED else f"{self.found}; wanted:"
        return f"FAIL  {self.name:<22} {sides} {self.wanted}; fix: {self.fix}"

    def problem(self) -> Problem | None:
        """The problem of a check that has not passed."""
        if self.passed:
            return None
        return Problem(self.code, f"{self.name}: found {self.found}, wanted {self.wanted}", fix=advice(self.fix))


def checks(lock: Lock, run: str, free_disk: float, free_shm: float) -> Iterator[PreflightCheck]:
    """Every check, in the order of the report; the run folder and shared memory need so much room, in GiB."""
    here, refusals = _facts_here(lock)
    keys = differing(lock, here)
    yield from _megatron()
    yield from _versions(lock, here, keys)
    yield from _contents_and_plan(lock, here, keys, refusals)
    yield from (_difference(lock, key, here) for key in keys if kind_of(key) == "variable")
    yield from _operators(lock, here, keys)
    yield _data_helpers()
    yield _sample_numbers(lock)
    yield from _build_locks()
    yield _space("disk", _existing(Path(run)), free_disk, "free some space, or give another --run FOLDER")
    if SHARED_MEMORY.is_dir():
        yield _space("shared-memory", SHARED_MEMORY, free_shm, "start the container with a larger --shm-size")
    yield _saving_time()


def _saving_time() -> PreflightCheck:
    """Name the time that torchrun gives ranks to save after a signal."""
    seconds = os.environ.get(SAVING_TIME)
    given = f"{seconds} s to save after SIGTERM" if seconds else f"30 s to save after SIGTERM unless {SAVING_TIME} is set"
    return PreflightCheck("saving-time", True, f"under torchrun ranks have {given}", "any")


def _megatron() -> Iterator[PreflightCheck]:
    copies = megatron_copies()
    found = "; ".join(f"{copy.version or 'unknown version'} in {copy.root}{' (wins)' * copy.wins}" for copy in copies)
    mixed = mixed_roots()
    single = len({copy.version for copy in copies}) == 1 and mixed is None
    fix = mixed.fix_text if mixed is not None else "uninstall the other copies, or remove them from PYTHONPATH"
    yield PreflightCheck("megatron-copies", single, found or "none", "copies of one version", fix, "MS506")


def _facts_here(lock: Lock) -> tuple[Content, list[PreflightCheck]]:
    """Return the facts of the locked request on this node, and why it has no plan here; those of the locked plan then."""
    from mindspeed import registry
    from mindspeed.workbench.lint.locked_command import COMMAND, importable, plan_of_locked

    plan, refusals = lock.plan, list[PreflightCheck]()
    of_job = {key: value for key, value in lock.content.items() if kind_of(key) in ("option", "training", "data")}
    variables = numeric_variables(os.environ)
    with importable(lock.job[COMMAND]["program"]) if COMMAND in lock.job else nullcontext():
        try:
            plan = plan_of_locked(lock.job)
        except MindSpeedError as error:
            wanted = f"plan {lock.plan.digest}"
            refusals = [PreflightCheck("plan", False, f"{p.code} {p.message}", wanted, p.fix_text) for p in error.problems]
        return registry.content_of(plan, variables) | of_job, refusals


def _versions(lock: Lock, here: Content, keys: Sequence[str]) -> Iterator[PreflightCheck]:
    for key in {**lock.content, **here}:
        if kind_of(key) == "version" and key not in keys:
            found = here[key] if key in lock.content else f"{here[key]} (not in the lock)"
            yield PreflightCheck(key.replace(" ", "-", 1), True, found, here[key])
        elif kind_of(key) == "version":
            yield _difference(lock, key, here)


def _contents_and_plan(
    lock: Lock, here: Content, keys: Sequence[str], refusals: Sequence[PreflightCheck]
) -> Iterator[PreflightCheck]:
    """A line for every file and every fact of the plan that differs, and one for each group without a difference."""
    yield from refusals
    for group in ("patch-contents", "megatron-contents", "plan"):
        found = [key for key in keys if _group(key) == group]
        yield from (_difference(lock, key, here) for key in found[:SHOWN])
        if len(found) > SHOWN:
            yield PreflightCheck(group, False, f"{len(found) - SHOWN} more differences", "none", _SAME_PACKAGES)
        elif not found and not (group == "plan" and refusals):
            files = sum(_group(key) == group for key in lock.content)
            as_locked = f"{files} files equal to the lock file" if files else "not in the lock file"
            as_locked = f"plan {lock.plan.digest}" if group == "plan" else as_locked
            yield PreflightCheck(group, True, as_locked, as_locked)


def _group(key: str) -> str:
    """Return the name under which a fact counts that agrees; '' for those with a line of their own."""
    return _GROUPS.get(kind_of(key), "plan")


def _difference(lock: Lock, key: str, here: Content) -> PreflightCheck:
    found, wanted, fix = describe(key, here.get(key)), locked_value(lock, key, here), _fix(key, lock.content.get(key))
    return PreflightCheck(key.replace(" ", "-", 1), False, found, wanted, fix)


def _fix(key: str, locked: str | None) -> str:
    """Return what makes a fact of this node the locked one; None is one that the lock has not."""
    kind, _, name = key.partition(" ")
    if kind == "operator":
        return _OPERATORS_FIX
    if kind == "version" and locked is not None:
        return f"use the image with {name} {locked}" if name in ("python", "megatron") else f"pip install {name}=={locked}"
    if kind == "variable":
        return f"unset {name}" if locked is None else f"export {name}={locked}"
    if kind == "feature" and locked is not None and not locked.startswith("mindspeed "):
        return f"pip install {locked.replace(' ', '==')}"
    return _SAME_PACKAGES


def _operators(lock: Lock, here: Content, keys: Sequence[str]) -> Iterator[PreflightCheck]:
    """Return whether this node runs the variants that the platform has; a node without them holds up all the others."""
    from mindspeed import registry
    from mindspeed.ops.availability import standings

    locked = [key for key in keys if kind_of(key) == "operator"]
    yield from (_difference(lock, key, here) for key in locked)
    catalog, platform = registry.catalog_for(lock.plan.names), lock.plan.environment["platform"]
    ops = {op for name in lock.plan.names if name in catalog.specs for op in catalog.specs[name].ops}
    rows = [row for row in standings(platform) if row.name in ops and f"operator {row.name}" not in locked]
    slow = [row for row in rows if row.runs != row.variant]
    words = [f"{row.name} {row.runs or 'nothing'}{f' ({row.why})' if row in slow else ''}" for row in rows]
    found, wanted = ", ".join(words) or "none needed", "the best variant of each operator"
    yield PreflightCheck("operators", not slow, found, wanted, _OPERATORS_FIX, "MS515")


def _data_helpers() -> PreflightCheck:
    """Megatron's compiled data helpers load in a process of their own, or can be compiled."""
    wanted = "loadable data helpers, or a compiler for them"
    root = package_root("core")
    if root is None:
        return PreflightCheck("data-helpers", False, "no megatron", wanted, "install megatron-core", "MS507")
    folder = root / "core" / "datasets"
    built = [folder / f"helpers_cpp{suffix}" for suffix in EXTENSION_SUFFIXES if (folder / f"helpers_cpp{suffix}").is_file()]
    if built:
        error = probe(_LOAD, str(built[0])).get("error", "")
        fix = f"remove {built[0]} and let Megatron compile it again"
        return PreflightCheck("data-helpers", not error, error or f"{built[0].name} loads", wanted, fix, "MS507")
    missing = [tool for tool in ("g++", "make") if shutil.which(tool) is None]
    missing += [] if find_spec("pybind11") is not None else ["pybind11"]
    missing += [] if os.access(folder, os.W_OK) else [f"write permission in {folder}"]
    text = "not compiled, but can be compiled" if not missing else f"not compiled, and there is no {' and no '.join(missing)}"
    fix = "install megatron-core's wheel, or the missing tools"
    return PreflightCheck("data-helpers", not missing, text, wanted, fix, "MS507")


_LOAD: Final = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("helpers_cpp", sys.argv[1])
spec.loader.exec_module(module_from_spec(spec))
print("{}")
"""


def _sample_numbers(lock: Lock) -> PreflightCheck:
    """Old data helpers number all tokens of a run in 32 bits."""
    world, train = lock.plan.world.known(), lock.job.get("train", {})
    sizes = (train.get("train_iters"), world.get("global_batch_size"), world.get("seq_length"))
    wanted = "fewer tokens than 2^31, or data helpers with 64-bit counters"
    if not all(isinstance(size, int) for size in sizes):
        return PreflightCheck("token-numbers", True, "number of tokens unknown", wanted, code="MS508")
    iters, batch, length = sizes
    tokens = iters * batch * length
    wide = tokens <= INT32 or _counts_in_64_bits()
    text = f"{iters} x {batch} x {length} = {tokens} tokens"
    return PreflightCheck("token-numbers", wide, text, wanted, "use Megatron 0.8 or newer", "MS508")


def _counts_in_64_bits() -> bool:
    root = package_root("core")
    try:
        source = (root / "core" / "datasets" / "helpers.cpp").read_text(encoding="utf-8") if root is not None else ""
    except OSError:
        return False
    return re.search(r"int64_t\s+num_samples\s*=\s*0|int64_t\s+sample_idx_index", source) is not None


def _build_locks() -> Iterator[PreflightCheck]:
    """Locks of extension builds that nobody will release; they are reported, never removed.

    torch makes an empty file ``lock`` in the folder of a build and keeps it open; every other process waits until it is
    gone, without a limit. A build that is killed leaves it behind.
    """
    locks = build_locks()
    stale = [lock for lock in locks if lock.stale]
    found = "; ".join(map(str, stale or locks)) or f"none in {extension_cache()}"
    names = " ".join(str(lock.path) for lock in stale)
    fix = f"rm {names}, unless another host is building in that folder"
    yield PreflightCheck("build-locks", not stale, found, "no abandoned lock file of an extension build", fix, "MS504")


def _space(name: str, folder: Path, wanted: float, fix: str) -> PreflightCheck:
    free = shutil.disk_usage(folder).free / GIB
    return PreflightCheck(name, free >= wanted, f"{free:.1f} GiB free in {folder}", f"{wanted:g} GiB", fix, "MS503")


def _existing(folder: Path) -> Path:
    """The nearest folder above that exists: the run's own may be made later."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


@dataclass(frozen=True, slots=True)
class BuildLock:
    """A lock file; ``holder`` is the process on this host that has it open, 0 when there is none."""

    path: Path
    age: float
    holder: int

    @property
    def stale(self) -> bool:
        """Return whether no process of this host holds it, and none can have just made it."""
        return self.holder == 0 and self.age > YOUNG

    def __str__(self) -> str:
        who = f"held by process {self.holder} on {os.uname().nodename}" if self.holder else "held by no process on this host"
        return f"{self.path} {who}, {_span(self.age)} old"


def extension_cache() -> Path:
    """The folder in which torch builds extensions: ``TORCH_EXTENSIONS_DIR``, else in the user's cache."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(given) if given else Path(cache) / "torch_extensions"


def build_locks(cache: Path | None = None) -> list[BuildLock]:
    """Every lock in torch's extension cache."""
    folder = cache or extension_cache()
    found = sorted({*folder.glob("lock"), *folder.glob("*/lock"), *folder.glob("*/*/lock")}) if folder.is_dir() else []
    locks, now = [], time.time()
    for path in found:
        try:
            state = path.stat()
        except OSError:
            continue  # released meanwhile
        locks.append(BuildLock(path, max(0.0, now - state.st_mtime), _holder(state)))
    return locks


def _holder(state: os.stat_result) -> int:
    """A process of this host that has this file open; those of other users are not visible to all."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for handle in (process / "fd").iterdir():
                opened = handle.stat()
                if (opened.st_ino, opened.st_dev) == (state.st_ino, state.st_dev):
                    return int(process.name)
        except OSError:
            continue  # it has ended, or is not ours to look at
    return 0


def _span(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
