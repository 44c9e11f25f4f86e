"""What distributions add besides features: verbs, readers of flags. Each kind is a group of entry points. Light."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import Any

from mindspeed.plugins.found import allowed_distributions, broken_fix
from mindspeed.problems.problem import MindSpeedError, Problem


@dataclass(frozen=True, slots=True)
class Extension:
    """Describe an object that a distribution names in a group of entry points."""

    name: str
    reference: str
    distribution: str
    version: str

    @property
    def where(self) -> str:
        """Distribution, version and the reference to the object."""
        return f"{self.distribution} {self.version}, {self.reference}"

    def load(self) -> Any:
        """Import the object. Raises MindSpeedError with MS101 and the distribution if that fails."""
        try:
            return metadata.EntryPoint(self.name, self.reference, "").load()
        except Exception as error:  # a package may fail in any way when it is imported
            text = f"{self.name} of {self.distribution} cannot be imported: {type(error).__name__}: {error}"
            raise MindSpeedError([Problem("MS101", text, where=self.where, fix=broken_fix(self.distribution))]) from error


@lru_cache(maxsize=8)
def extensions(group: str) -> tuple[Extension, ...]:
    """Find the objects of a group in the distributions that MINDSPEED_PLUGINS allows, ours first, then by name."""
    found = [
        Extension(entry.name, entry.value, name, version)
        for name, version, provider in allowed_distributions()
        for entry in provider.entry_points
        if entry.group == group
    ]
    return tuple(sorted(found, key=lambda one: (one.distribution != "mindspeed", one.name)))
