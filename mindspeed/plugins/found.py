"""Installed features, known from folders and metadata alone; no feature is imported."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from mindspeed.problems import Fixes, Problem, advice

if TYPE_CHECKING:
    from mindspeed.plugins.feature import Feature

ENTRY_POINTS: Final = "mindspeed.features"
BUILT_IN: Final = "mindspeed"
PLUGINS_VARIABLE: Final = "MINDSPEED_PLUGINS"
"""Environment variable that says whose features may be loaded: ``all``, ``none``, or names of distributions."""
LEFT_OUT: Final = "MS105"

_FEATURES: Final = Path(__file__).resolve().parent.parent / "features"


@dataclass(frozen=True, slots=True)
class DiscoveredFeature:
    """Describe a discovered feature: its origin, its class if it loaded, its problem if it did not or may not."""

    name: str
    distribution: str
    version: str
    reference: str
    feature: type[Feature[Any]] | None = None
    problem: Problem | None = None

    @property
    def state(self) -> str:
        """``ok``, ``broken``, ``left out`` (by MINDSPEED_PLUGINS) or ``not loaded``."""
        if self.problem is not None:
            return "left out" if self.problem.code == LEFT_OUT else "broken"
        return "ok" if self.feature is not None else "not loaded"

    @property
    def where(self) -> str:
        """Distribution, version and the line that declares the feature."""
        place = declared_at(self.feature) if self.feature is not None else self.reference
        return f"{self.distribution} {self.version}, {place}"

    @property
    def described(self) -> str:
        """The command that prints the page of a built-in feature; of another one, where it is declared."""
        return f"mindspeed docs {self.name}" if self.distribution == BUILT_IN else self.where

    def broken(self, code: str, message: str) -> DiscoveredFeature:
        """The same row with a problem, whose fix is to repair or uninstall the distribution."""
        problem = Problem(code, message, (self.name,), where=self.where, fix=broken_fix(self.distribution))
        return replace(self, feature=None, problem=problem)


def broken_fix(distribution: str) -> Fixes:
    """Return what to do about a distribution that cannot be loaded."""
    return advice(f"fix or uninstall {distribution}" if distribution != BUILT_IN else "reinstall mindspeed")


def declared_at(feature: type[Feature[Any]]) -> str:
    """``package/module.py:line`` of a feature class."""
    module = feature.__module__.replace(".", "/") + ".py"
    key: Any = feature  # mypy takes the unbound __hash__ of a class for its own
    line = _line_of(key)
    return f"{module}:{line}" if line else module


@lru_cache(maxsize=512)
def _line_of(feature: Any) -> int:
    """The line of a class, for which its file is read once; 0 where there is none."""
    import inspect

    try:
        return inspect.getsourcelines(feature)[1]
    except (OSError, TypeError):
        return 0


def installed() -> list[DiscoveredFeature]:
    """A row for each feature that is built in or that a distribution names in its metadata, by name; none is loaded.

    A third party that takes the name of a built-in feature, and two that take one name, are broken before any code of
    theirs runs. What MINDSPEED_PLUGINS leaves out is a row with that as its problem, and takes no name from anybody.
    """
    rows = [*of_folders("feature"), *_third_parties()]
    left_out = [row for row in rows if row.problem is not None]
    return sorted([*_without_clashes(row for row in rows if row.problem is None), *left_out], key=lambda row: row.name)


def of_folders(module: Literal["feature", "base"]) -> Iterator[DiscoveredFeature]:
    """A row for each folder with this module: ``feature`` is one that jobs name, ``base`` one that every plan has by itself."""
    from mindspeed._version import __version__

    for folder in sorted(os.listdir(_FEATURES)):
        if (_FEATURES / folder / f"{module}.py").is_file():
            yield DiscoveredFeature(folder.replace("_", "-"), BUILT_IN, __version__, f"mindspeed.features.{folder}.{module}")


def _third_parties() -> Iterator[DiscoveredFeature]:
    wanted = os.environ.get(PLUGINS_VARIABLE, "").strip() or "all"
    allowed = {_plain(name) for name in wanted.split(",")}
    seen = set()
    for provider in metadata.distributions():
        place = Path(str(getattr(provider, "_path", "a distribution"))).name
        try:
            name = getattr(provider, "_normalized_name", place)
            rows = list(_named_by(provider)) if name not in seen else []
        except Exception as error:  # what a distribution says of itself may be damaged in any way
            name, _, version = place.rpartition(".")[0].partition("-")
            text = f"the metadata of {place} cannot be read: {type(error).__name__}: {error}"
            yield DiscoveredFeature(place, name, version, "entry_points.txt or METADATA").broken("MS101", text)
            continue
        seen.add(name)
        yield from (row if wanted == "all" or _plain(row.distribution) in allowed else _left_out(row, wanted) for row in rows)


def _named_by(provider: metadata.Distribution) -> Iterator[DiscoveredFeature]:
    """A row for each feature that the metadata of a distribution names; a folder without metadata belongs to none."""
    for entry in provider.entry_points:
        if entry.group == ENTRY_POINTS and provider.metadata:
            name, version = provider.metadata["Name"], provider.metadata["Version"]
            if not (name and version):
                raise ValueError("METADATA has no Name or no Version")
            yield DiscoveredFeature(entry.name, name, version, entry.value.partition("[")[0].replace(" ", ""))


def allowed_entries(group: str) -> Iterator[tuple[str, str, metadata.EntryPoint]]:
    """Yield each entry point of a group in mindspeed and in what MINDSPEED_PLUGINS allows, after name and version of its owner.

    A distribution with damaged metadata has none; `installed` reports it.
    """
    wanted = os.environ.get(PLUGINS_VARIABLE, "").strip() or "all"
    allowed = {_plain(name) for name in wanted.split(",")} | {BUILT_IN}
    seen = set()
    for provider in metadata.distributions():
        name = getattr(provider, "_normalized_name", None)
        if name is None or name in seen:
            continue
        seen.add(name)
        with suppress(Exception):  # what a distribution says of itself may be damaged in any way
            if f"[{group}]" in (provider.read_text("entry_points.txt") or "") and (wanted == "all" or _plain(name) in allowed):
                entries = [entry for entry in provider.entry_points if entry.group == group]
                yield from [(provider.metadata["Name"], provider.version, entry) for entry in entries]


def unmatched(rows: Iterable[DiscoveredFeature]) -> list[str]:
    """Names in MINDSPEED_PLUGINS that no distribution with features has."""
    named = [name.strip() for name in os.environ.get(PLUGINS_VARIABLE, "").split(",")]
    known = {"", "all", "none", *(_plain(row.distribution) for row in rows)}
    return [name for name in named if _plain(name) not in known]


def _left_out(row: DiscoveredFeature, wanted: str) -> DiscoveredFeature:
    text = f"feature {row.name} is not loaded, because {PLUGINS_VARIABLE} is {wanted!r}"
    allow = row.distribution if wanted == "none" else f"{wanted},{row.distribution}"
    fix = f"{PLUGINS_VARIABLE}={allow}, if you trust {row.distribution}"
    return replace(row, problem=Problem(LEFT_OUT, text, (row.name,), where=row.where, fix=advice(fix)))


def _plain(name: str) -> str:
    return name.strip().replace("_", "-").lower()


def _without_clashes(rows: Iterable[DiscoveredFeature]) -> Iterator[DiscoveredFeature]:
    by_name: dict[str, list[DiscoveredFeature]] = defaultdict(list)
    for row in rows:
        by_name[row.name].append(row)
    for name, same in by_name.items():
        if len(same) == 1:
            yield same[0]
            continue
        built_in = [row for row in same if row.distribution == BUILT_IN]
        yield from built_in[:1]
        providers = " and ".join(sorted(f"{row.distribution} {row.version}" for row in same))
        for row in same if not built_in else [row for row in same if row.distribution != BUILT_IN]:
            yield row.broken("MS102", f"several packages provide the feature {name}: {providers}")
