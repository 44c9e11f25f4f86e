"""The environment a plan is made for: platform and versions, probed here or made up. Imports neither torch nor megatron."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from typing import Final

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from mindspeed.job.world import PLATFORMS
from mindspeed.problems import Fix, Problem

SUPPORTED_MEGATRON: Final = ">=0.14,<0.21"
"""Range of megatron-core that the built-in features are proven on."""
UNTESTED_MEGATRON: Final = ">=0.21"
"""Newer releases: a plan for one has a warning, and a problem for each of its targets that has changed or gone."""

ENGINE: Final = "transformer_engine"


@dataclass(frozen=True, slots=True)
class Environment:
    """Platform and versions. None is *unknown*; ``world_size`` is that of a job this process already belongs to.

    ``training`` says that the process runs Megatron-LM's training loop, ``megatron.training``, and ``engine`` that a
    Transformer Engine can be imported.
    """

    platform: str
    megatron: str | None = None
    torch: str | None = None
    world_size: int | None = None
    source: str = "made up"
    training: bool = False
    engine: bool = False

    def versions(self) -> dict[str, str]:
        """The known versions that belong into a plan."""
        from mindspeed._version import __version__

        known = {"platform": self.platform, "mindspeed": __version__, "megatron": self.megatron, "torch": self.torch}
        return {name: value for name, value in known.items() if value is not None}

    def problems(self) -> list[Problem]:
        """List the problems that make this environment unusable for every feature."""
        found = []
        if self.platform not in PLATFORMS:
            text = f"unknown platform {self.platform!r}"
            found.append(Problem("MS501", text, where=self.source, fix=Fix.advise(f"use one of {', '.join(PLATFORMS)}")))
        if self.megatron is not None and not is_version(self.megatron):
            text = f"megatron-core {self.megatron!r} is not a version"
            found.append(Problem("MS502", text, where=self.source, fix=Fix.give_field("megatron", "0.16.1")))
        elif self.megatron is not None and not any(
            version_in(self.megatron, versions) for versions in (SUPPORTED_MEGATRON, UNTESTED_MEGATRON)
        ):
            text = f"megatron-core {self.megatron} is not supported; supported is {SUPPORTED_MEGATRON}"
            found.append(Problem("MS502", text, where=self.source, fix=Fix.run_command("pip install megatron-core==0.16.1")))
        return found


def made_up(platform: str, megatron: str | None = None, torch: str | None = None) -> Environment:
    """An environment for a job that will run elsewhere."""
    return Environment(platform, megatron, torch, engine=platform == "cuda")


def installed_version(distribution: str, local: bool = False) -> str | None:
    """Version of an installed distribution or None, by default without its local part (``2.13.0+cpu`` -> ``2.13.0``)."""
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    return version if local else version.partition("+")[0]


def engine_origin() -> str | None:
    """Return the file of a Transformer Engine that can be found, None without one. A stand-in has no file."""
    try:
        found = find_spec(ENGINE)
    except ValueError:  # other code put a module without a spec into sys.modules
        return ENGINE
    return found.origin if found is not None else None


def engine_installed() -> bool:
    """Return whether a Transformer Engine can be found."""
    return engine_origin() is not None


def is_version(text: str) -> bool:
    """Return whether a text is the number of a version."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


@lru_cache(maxsize=256)
def version_in(version: str, specifier: str) -> bool:
    """Return whether ``version`` lies in ``specifier``; an empty specifier admits all, a malformed version is in none."""
    return not specifier or (is_version(version) and SpecifierSet(specifier, prereleases=True).contains(Version(version)))
