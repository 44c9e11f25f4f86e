"""ActivationPlan: the frozen product of resolution, printed, checked, compared and stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Final

from pydantic import TypeAdapter

from mindspeed.engine.resolution.planned_feature import PlannedFeature, PlanNote
from mindspeed.job.world import World, typed_values
from mindspeed.plugins.patches import ArgOverride, Patch, Ref, Set, patch_from_json

PLAN_FORMAT: Final = 3
OF_JOB: Final = ("torch", "world_size")
"""Values that only the processes of a job know for certain: they stand beside the digest, not in it."""


@dataclass(frozen=True, slots=True)
class PlannedOverride:
    """A Megatron argument that the plan sets, and who wants it so; an ``optional`` one need not be read in every run."""

    owners: tuple[str, ...]
    override: ArgOverride
    optional: bool = False


@dataclass(frozen=True, slots=True)
class PlannedPatch:
    """A patch with its owner.

    ``site`` is where the last definition binds it (equal to the target until it was looked up).
    ``ground`` patches belong to the base plan: what they leave counts as the original.
    ``skipped`` says why a patch is left out; empty means that it is applied.
    """

    owner: str
    patch: Patch
    site: str
    ground: bool = False
    skipped: str = ""

    @property
    def reference(self) -> str | None:
        """``"module:qualname"`` of the object that the patch names; None for a plain value."""
        value = self.patch.value
        if isinstance(value, Ref):
            return value.target
        return None if isinstance(self.patch, Set) else str(value)


@dataclass(frozen=True)
class ActivationPlan:
    """Features in activation order, with everything they change. Plans of equal requests have equal digests.

    ``base`` are the platform and compatibility plugins of level 0, then come ``features``.
    ``world`` holds the known values, ``environment`` versions and platform of the process the plan is for.
    Under ``strict`` what the proof warns of is an error.
    """

    features: tuple[PlannedFeature, ...]
    world: World
    level: int = 2
    base: tuple[PlannedFeature, ...] = ()
    overrides: tuple[PlannedOverride, ...] = ()
    patches: tuple[PlannedPatch, ...] = ()
    rows: tuple[PlanNote, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the active features, in order."""
        return tuple(feature.name for feature in self.features)

    @cached_property
    def digest(self) -> str:
        """Hash of names, settings, world and patch contents; never of paths, sources, host names, or what only a rank knows."""
        content = {
            "format": PLAN_FORMAT,
            "features": [[f.name, f.distribution, f.version, f.args] for f in (*self.base, *self.features)],
            "world": _shared(self.world.known()),
            "environment": _shared(self.environment),
            "level": self.level,
            "strict": self.strict,
            "overrides": [[o.override.argument, o.override.value, o.override.only] for o in self.overrides],
            "patches": [[p.owner, p.patch.to_json(), p.site, p.skipped] for p in self.patches],
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def is_same(self, other: ActivationPlan) -> bool:
        """Return whether another plan does the same in this process: the number of processes is equal too."""
        return (self.digest, self.world) == (other.digest, other.world)

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `plan_from_json` makes an equal plan."""
        return {
            "format": PLAN_FORMAT,
            "digest": self.digest,
            "level": self.level,
            "strict": self.strict,
            "world": self.world.known(),
            "environment": dict(self.environment),
            "base": [f.to_json() for f in self.base],
            "features": [f.to_json() for f in self.features],
            "layer_split": list(self.world.layer_split),
            "overrides": [{"owners": list(o.owners), "optional": o.optional, **o.override.to_json()} for o in self.overrides],
            "patches": [asdict(p) | {"patch": p.patch.to_json()} for p in self.patches],
            "rows": [row.to_json() for row in self.rows],
        }


def _shared(values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the values that a laptop and the ranks of a job have alike."""
    return {name: value for name, value in values.items() if name not in OF_JOB}


def plan_from_json(data: Mapping[str, Any]) -> ActivationPlan:
    """Inverse of `ActivationPlan.to_json`. Raises ValueError for a plan of another format or with a wrong digest."""
    if data.get("format") != PLAN_FORMAT:
        raise ValueError(
            f"the plan has format {data.get('format')!r}, but this mindspeed reads {PLAN_FORMAT}; make the plan again"
        )

    features = TypeAdapter(tuple[PlannedFeature, ...]).validate_python
    plan = ActivationPlan(
        features=features(data["features"]),
        world=World(typed_values(data["world"]), data.get("layer_split", ())),
        level=data["level"],
        base=features(data["base"]),
        overrides=tuple(
            PlannedOverride(tuple(o["owners"]), ArgOverride(o["argument"], o["value"], o["reason"], o["only"]), o["optional"])
            for o in data["overrides"]
        ),
        patches=tuple(PlannedPatch(**p | {"patch": patch_from_json(p["patch"])}) for p in data["patches"]),
        rows=TypeAdapter(tuple[PlanNote, ...]).validate_python(data["rows"]),
        environment=data["environment"],
        strict=data["strict"],
    )
    if plan.digest != data["digest"]:
        raise ValueError(f"the plan digest {data['digest']} does not match the content of the plan, {plan.digest}")
    return plan
