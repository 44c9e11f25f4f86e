"""Extensions other than features: verbs, readers of flags. Each kind is a group of entry points. Light."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import Any

from mindspeed.plugins.found import allowed_entries, broken_fix
from mindspeed.problems import MindSpeedError, Problem


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
        except (Exception, SystemExit) as error:  # a package may fail in any way when it is imported
            raise self.broken("MS101", f"cannot be imported: {type(error).__name__}: {error}") from error

    def broken(self, code: str, what: str) -> MindSpeedError:
        """Return the error with what is wrong with the object, and which distribution to repair."""
        text = f"{self.name} of {self.distribution} {what}"
        return MindSpeedError([Problem(code, text, where=self.where, fix=broken_fix(self.distribution))])


@lru_cache(maxsize=8)
def extensions(group: str) -> tuple[Extension, ...]:
    """Find the objects of a group in the distributions that MINDSPEED_PLUGINS allows, ours first, then by name."""
    found = [
        Extension(entry.name, entry.value, distribution, version) for distribution, version, entry in allowed_entries(group)
    ]
    return tuple(sorted(found, key=lambda one: (one.distribution != "mindspeed", one.name, one.distribution)))
