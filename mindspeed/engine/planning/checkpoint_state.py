"""The features that a checkpoint was saved with, and whether a job with others can load it. Light.

The declaration of each feature's state is stored with the checkpoint: when it is resumed, the feature may be gone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import TypeAdapter, ValidationError

from mindspeed.engine.planning.checkpoint_layers import NAMES, conversion, layers_of, unfit_layers
from mindspeed.engine.planning.fingerprint import Content, text_of
from mindspeed.engine.planning.lock import facts_of
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.environment import version_in
from mindspeed.engine.resolution.planned_feature import PlannedFeature
from mindspeed.plugins.feature import CheckpointState, Feature, ResumeVerdict
from mindspeed.problems import Fix, Problem, RunError, advice

FILE: Final = "features.json"
FORMAT: Final = 1
_OWN_COMMON_FILE: Final = "<0.19"
"""The releases of megatron-core that need the file."""
_FLAT_SHARDS: Final = "<0.15"
"""The releases of megatron-core that store shards of the distributed optimizer flat, each beside the shape of the whole."""
_SHAPE_OF_WHOLE: Final = b"nd_reformulated_orig_global_shape"
_FILES_OF_RANKS: Final = "mp_rank_*"
"""Names of the files of a checkpoint in Megatron-LM's format torch."""
_ONE_LAYOUT: Final = "the checkpoint stores the weights of each rank in a file (format torch), which no other layout can load"
_SOFTWARE: Final = ("mindspeed", "megatron", "torch")

Classes = Mapping[str, type[Feature[Any]]]
"""The class of every feature of a plan that is installed here, by name."""


@dataclass(frozen=True, slots=True)
class SavedFeature:
    """A feature as a checkpoint remembers it."""

    name: str
    distribution: str
    version: str
    settings: Mapping[str, Any]
    state: CheckpointState


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """The features at work in a checkpoint's run, in activation order, and the content of their plan (`content_of`)."""

    features: tuple[SavedFeature, ...]
    plan: str
    content: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Store in a checkpoint folder."""
        (folder / FILE).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Stored(CheckpointManifest):
    """A record with the version of its format, as it stands in the file."""

    format: Literal[1] = field(kw_only=True)

    @property
    def manifest(self) -> CheckpointManifest:
        return CheckpointManifest(self.features, self.plan, self.content)


@dataclass(frozen=True, slots=True)
class Change:
    """Describe a difference between a checkpoint and the job that resumes it, and what becomes of the checkpoint."""

    feature: str
    what: str
    verdict: ResumeVerdict
    reason: str
    saved: str = ""
    now: str = ""
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:<11}  {self.what}: {self.reason}"


def record_of(plan: ActivationPlan, classes: Classes, content: Content) -> CheckpointManifest:
    """Make the record that a checkpoint of this plan stores."""
    saved = (
        SavedFeature(feature.name, feature.distribution, feature.version, feature.args, _declared(feature, classes))
        for feature in _effective_features(plan, classes)
    )
    return CheckpointManifest(tuple(saved), plan.digest, content)


def read_record(folder: Path) -> CheckpointManifest | None:
    """The record of a checkpoint folder; None when it has none. Raises RunError with MS602 for a damaged one."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return TypeAdapter(_Stored).validate_json(path.read_bytes()).manifest
    except (OSError, ValueError, TypeError) as error:
        text = f"the features of the checkpoint cannot be read: {_words(error)}"
        fix = Fix.advise("resume an earlier checkpoint of the run, or copy this one again")
        raise RunError([Problem("MS602", text, where=str(path), fix=fix)]) from error


def _words(error: Exception) -> str:
    """Describe a damage without the documentation links of pydantic."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}".removeprefix(": ") for wrong in error.errors()[:3])


def keeps_common_file(folder: Path) -> bool:
    """Return whether a distributed checkpoint has a separate file, ``common.pt``, for data other than tensors.

    All releases until 0.18 write it; from 0.19 on its content lies among the tensors. Also for what cannot be read.
    """
    try:
        written = TypeAdapter(dict[str, Any]).validate_json((folder / "metadata.json").read_bytes())
    except (OSError, ValueError):
        return True
    return "sharded_backend" not in written or bool(written.get("common_backend"))


def unreadable_format(folder: Path, megatron: str | None, *, shards_optimizer: bool = False) -> Problem | None:
    """MS602 for a distributed checkpoint whose format an older megatron-core, which shall read it, does not know.

    0.19 reads what was saved before it, and not the other way round; 0.14 finds an optimizer's shards only where it wrote them.
    """
    if megatron is None:
        return None
    if version_in(megatron, _OWN_COMMON_FILE) and not keeps_common_file(folder):
        return _unread(
            folder, megatron, "the torch_dist format of megatron-core 0.19 and newer, without common.pt", "0.19", "both formats"
        )
    if shards_optimizer and version_in(megatron, _FLAT_SHARDS) and not _has_flat_shards(folder):
        form = "distributed optimizer state in the shapes of the parameters, as saved by megatron-core 0.15 and newer"
        return _unread(folder, megatron, form, "0.15", "this format")
    return None


def _unread(folder: Path, megatron: str, form: str, reader: str, kinds: str) -> Problem:
    text = f"the checkpoint uses {form}, which megatron-core {megatron} cannot read"
    fix = f"resume it with megatron-core {reader} or newer, which reads {kinds}"
    return Problem("MS602", text, where=str(folder), fix=advice(fix))


def _has_flat_shards(folder: Path) -> bool:
    """Return whether the index of a checkpoint names shapes of flat shards; also for one that cannot be read."""
    try:
        return _SHAPE_OF_WHOLE in (folder / ".metadata").read_bytes()
    except OSError:
        return True


def changes(record: CheckpointManifest, plan: ActivationPlan, classes: Classes, content: Content, folder: Path) -> list[Change]:
    """Every difference that the checkpoint in ``folder`` could notice; refused ones first.

    ``content`` has the facts of the plan here. A checkpoint with a file per rank cannot be converted.
    """
    all_changes = [*other_layers(folder, plan), *_features(record, plan, classes), *_software(record, content)]
    if next(folder.glob(_FILES_OF_RANKS), None) is not None:
        all_changes = [
            replace(change, verdict="refused", reason=_ONE_LAYOUT) if change.verdict == "convertible" else change
            for change in all_changes
        ]
    return sorted(all_changes, key=lambda change: ("refused", "convertible", "safe").index(change.verdict))


def other_layers(folder: Path, plan: ActivationPlan) -> list[Change]:
    """Return the refusal of a checkpoint whose names are those of layers that the job does not build, else nothing."""
    before, after = layers_of(folder), unfit_layers(folder, plan.world)
    if before is None or after is None:
        return []
    what = f"the checkpoint contains {NAMES[before]}, but the job builds {NAMES[after]}"
    return [Change("", what, "refused", "their parameters have different names", before, after, conversion(folder, after))]


def refusals(found: list[Change], where: str, keeping: str = "") -> list[Problem]:
    """MS613 for every change after which the checkpoint cannot be resumed; ``keeping`` is a fix that keeps the new job."""
    return [
        Problem(
            "MS613",
            f"{change.what}: {change.reason}",
            (change.feature,) if change.feature else (),
            where=where,
            fix=(*advice(change.fix), *advice(keeping)),
        )
        for change in found
        if change.verdict == "refused"
    ]


def _features(record: CheckpointManifest, plan: ActivationPlan, classes: Classes) -> Iterator[Change]:
    saved = {feature.name: feature for feature in record.features}
    now = {feature.name: feature for feature in _effective_features(plan, classes)}
    for name in [*saved, *(name for name in now if name not in saved)]:
        if name not in now:
            old = saved[name]
            settings = [f"--set {name}.{key}={value}" for key, value in old.settings.items() if value is not None]
            verdict, fix = old.state.verdict("removed"), " ".join(["--features", name, *settings])
            yield Change(name, f"{name} was removed", verdict, _reason(old.state), saved=old.version, fix=fix)
            continue
        state = _declared(now[name], classes)
        if name in saved:
            yield from _kept(saved[name], now[name], state)
        else:
            verdict, fix = state.verdict("added"), f"--without {name}"
            yield Change(name, f"{name} was added", verdict, _reason(state), now=now[name].version, fix=fix)


def _kept(old: SavedFeature, new: PlannedFeature, state: CheckpointState) -> Iterator[Change]:
    """Differences of a feature that both have; its present declaration counts, which knows the older versions."""
    for key in [*old.settings, *(key for key in new.args if key not in old.settings)]:
        before, after = text_of(old.settings.get(key)), text_of(new.args.get(key))
        if before != after:
            what, fix = f"{new.name}.{key} changed from {before} to {after}", f"--set {new.name}.{key}={before}"
            verdict = state.verdict("changed", key)
            if verdict == "refused" and None in (old.settings.get(key), new.args.get(key)):
                verdict = state.verdict("changed")  # what is not given follows from the layout: load_extra knows the two values
            yield Change(new.name, what, verdict, _reason(state), before, after, fix)
    before, after = f"{old.distribution} {old.version}", f"{new.distribution} {new.version}"
    if before != after:
        what, fix = f"{new.name} changed from {before} to {after}", f"pip install {before.replace(' ', '==')}"
        yield Change(new.name, what, state.verdict("upgraded"), _reason(state), before, after, fix)


def _software(record: CheckpointManifest, here: Content) -> Iterator[Change]:
    """Versions and files, which no checkpoint holds; a reader of a curve that bends wants to know of them."""
    before, after = facts_of(record.content, "version"), facts_of(here, "version")
    for name in _SOFTWARE:
        if name in before and before[name] != after.get(name):
            what = f"{name} changed from {before[name]} to {after.get(name)}"
            yield Change("", what, "safe", "its checkpoints have a separate format", before[name], after.get(name, ""))
    old, new = facts_of(record.content, "source"), facts_of(here, "source")
    for module in sorted(name for name in old.keys() & new.keys() if old[name] != new[name]):
        yield Change("", f"{module} has different content", "safe", "code is not part of the state", old[module], new[module])


def _effective_features(plan: ActivationPlan, classes: Classes) -> Iterator[PlannedFeature]:
    """The features of a plan without those whose parallel size is one, which is the same as not being there."""
    for feature in plan.features:
        sizes = classes[feature.name].spec.sizes if feature.name in classes else {}
        settings = [setting for setting in sizes.values() if setting is not None]
        if not settings or any(feature.args.get(setting, 2) != 1 for setting in settings):
            yield feature


def _declared(feature: PlannedFeature, classes: Classes) -> CheckpointState:
    """The state that a feature declares; one that declares none and saves data has data of its own."""
    found = classes.get(feature.name)
    if found is None:
        return CheckpointState()
    state = found.spec.state
    if state.kind == "none" and hasattr(found, "save_extra"):
        return CheckpointState("own", "it stores separate data")
    return state


def _reason(state: CheckpointState) -> str:
    return state.reason or {"none": "it adds no data to checkpoints", "own": "it stores separate data"}.get(
        state.kind, "Megatron's distributed checkpoints can be resharded"
    )
