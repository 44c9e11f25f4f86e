"""Find the megatron that this process would import, without importing it.

`megatron` may be a namespace package with portions in several places, so its copies are found the way the
import system would look for them; asking for ``megatron.core`` itself would import the parent packages, and torch.
"""

from __future__ import annotations

import platform
import re
import sys
import typing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from packaging.specifiers import SpecifierSet

from mindspeed.problems import Fix, Problem

_PYTHON: Final = re.compile(r"""^requires-python *= *["']([^"']+)""", re.MULTILINE)
_CONSTANT: Final = re.compile(r"""^(MAJOR|MINOR|PATCH|PRE_RELEASE) *= *['"]?(\w+)""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class MegatronCopy:
    """Describe an importable ``megatron/core`` folder; of several, the one that ``wins`` is imported."""

    root: Path
    version: str | None
    wins: bool


def megatron_portions() -> tuple[Path, ...]:
    """Folders in which submodules of ``megatron`` are looked up, in order; empty when there is none."""
    try:
        spec = find_spec("megatron")
    except (ImportError, ValueError):
        return ()
    return tuple(map(Path, spec.submodule_search_locations or ())) if spec is not None else ()


def package_root(name: str) -> Path | None:
    """The portion that provides the package ``megatron.<name>``, for example ``core`` or ``training``."""
    return next((root for root in megatron_portions() if (root / name / "__init__.py").is_file()), None)


def megatron_version() -> str | None:
    """Version of the megatron-core that would be imported; None when there is none or it does not say."""
    root = package_root("core")
    return version_of(root) if root is not None else None


def megatron_copies() -> tuple[MegatronCopy, ...]:
    """Every copy of megatron-core that ``sys.path`` reaches, the winner first."""
    winner = package_root("core")
    winner = winner.resolve() if winner is not None else None
    roots = (*megatron_portions(), *(Path(entry or ".") / "megatron" for entry in sys.path))
    found = {root.resolve(): root for root in roots if (root / "core" / "__init__.py").is_file()}
    copies = [MegatronCopy(root, version_of(root), key == winner) for key, root in found.items()]
    return tuple(sorted(copies, key=lambda copy: not copy.wins))


def mixed_roots() -> Problem | None:
    """MS408 when ``megatron.core`` and ``megatron.training`` would come from different copies."""
    core, training = package_root("core"), package_root("training")
    if core is None or training is None or core.resolve() == training.resolve():
        return None
    return Problem(
        "MS408",
        f"megatron.core comes from {core / 'core'} and megatron.training from {training / 'training'}",
        fix=Fix.advise(f"put {training.parent} first on PYTHONPATH, or uninstall the other copy"),
    )


def python_problem(checkout: Path) -> Problem | None:
    """Return MS502 when this Python is too old to import the training loop of a checkout.

    What it takes from a newer Python is ``typing.override``: an older one that was given that name can import it.
    """
    try:
        needed = _PYTHON.search((checkout / "pyproject.toml").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    python = platform.python_version()
    if needed is None or hasattr(typing, "override") or SpecifierSet(needed[1]).contains(python, prereleases=True):
        return None
    text = f"Megatron-LM {version_of(checkout / 'megatron')} needs Python {needed[1]}, but this is {python}"
    return Problem(
        "MS502", text, where=str(checkout), fix=Fix.advise("start the job with a newer Python, or use Megatron-LM 0.16.1")
    )


def version_of(root: Path) -> str | None:
    """``MAJOR.MINOR.PATCH`` with pre-release of ``core/package_info.py``, which only assigns constants, below ``root``."""
    try:
        text = (root / "core" / "package_info.py").read_text(encoding="utf-8", errors="replace")
        return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format(**{"PRE_RELEASE": "", **dict(_CONSTANT.findall(text))})
    except (OSError, KeyError):
        return None
