"""Results of baseline runs, kept on disk: most of what verification computes is the same at every call.

A baseline depends on its plan, the recipe, the number of processes, the versions of torch and Megatron, the sources of
mindspeed and the processor. All of it is in the name of the file, so that nothing here is ever out of date. A file names
classes of results only; one that names anything else is not run, and is none.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import platform
import tempfile
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import mindspeed
from mindspeed.engine.inspection.megatron_copies import megatron_version
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.files.cache_folder import cache_folder, distrust, make_private
from mindspeed.workbench.verification.record import RankResult
from mindspeed.workbench.verification.shape import Recipe

KEPT: Final = 200
"""Files that stay; the least recently written ones are removed."""
_PARTS: Final = {
    "mindspeed.workbench.verification.record": ("RankResult", "TensorShard", "RoutingChoice"),
    "mindspeed.memory.byte_count": ("Bytes",),
    "builtins": ("slice", "Ellipsis"),
    "numpy": ("ndarray", "dtype"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy.core.numeric": ("_frombuffer",),
}
"""Names of what results are made of, by module."""
_VARIABLES: Final = ("MINDSPEED_OPS", "MINDSPEED_DISABLE")


def load(plan: ActivationPlan, recipe: Recipe, world_size: int) -> list[RankResult] | None:
    """The kept result of an equal run, or None."""
    if not _can_be_kept(plan):
        return None
    file = _file(plan, recipe, world_size)
    if distrust(file, cache_folder()) is not None:
        return None
    try:
        results: list[RankResult] = _Reader(io.BytesIO(file.read_bytes())).load()
    except (OSError, pickle.UnpicklingError, EOFError):
        return None
    return results


def store(plan: ActivationPlan, recipe: Recipe, world_size: int, results: list[RankResult]) -> None:
    """Keep a result, whole or not at all; where the folder cannot be written nothing is kept."""
    if not _can_be_kept(plan):
        return
    file = _file(plan, recipe, world_size)
    if distrust(file, cache_folder()) is not None:
        return
    with suppress(OSError):
        make_private(file.parent)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
            new.write(pickle.dumps(results))
        os.replace(new.name, file)
        for old in sorted(file.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)


class _Reader(pickle.Unpickler):
    """Read results and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _PARTS.get(module.replace("numpy._core", "numpy.core"), ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the file names {module}.{name}, which no result contains")


def _can_be_kept(plan: ActivationPlan) -> bool:
    """Return whether the fingerprint has the sources of all features, and the results are those of the processor."""
    return plan.environment["platform"] == "cpu" and all(p.distribution == "mindspeed" for p in plan.features)


def _file(plan: ActivationPlan, recipe: Recipe, world_size: int) -> Path:
    key = repr((plan.digest, recipe, world_size, _fingerprint(), [os.environ.get(name) for name in _VARIABLES]))
    return cache_folder() / "baselines" / hashlib.sha256(key.encode()).hexdigest()[:32]


@cache
def _fingerprint() -> str:
    """A digest of the versions of packages, of every source file of mindspeed and of the processor."""
    versions = (version("torch"), version("numpy"), megatron_version())
    digest = hashlib.sha256(repr((versions, platform.platform(), _processor())).encode())
    root = Path(mindspeed.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """Model and instructions, by which kernels and so the bits of results are chosen."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
