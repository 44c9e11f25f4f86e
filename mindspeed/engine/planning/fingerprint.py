"""Facts of a plan in this process, which two processes, or a process and a file, can compare.

A fact is a key ``"kind name"`` with a text as its value: ``"setting ring-attention.window": "2"``. Files count by what is
in them, never by where they are. Imports neither torch nor megatron.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Final

from mindspeed.engine.inspection.source import find_module
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.environment import installed_version
from mindspeed.files.tables import table_beside
from mindspeed.plugins.discovery import Catalog
from mindspeed.plugins.patches import ArgOverride

Content = Mapping[str, str]
VariantsOf = Callable[[Iterable[str], str], Mapping[str, str]]
"""``(operators, platform) -> {operator: variant that runs on this machine}``."""


@cache
def compared_variables() -> dict[str, str]:
    """Return the environment variables that must be equal on all ranks, and what each decides; ``*`` matches any ending.

    Left out on purpose is what may differ between nodes: network interfaces, addresses, devices, debug output, allocators,
    and OMP_NUM_THREADS, which follows the number of cores.
    """
    return {name: meaning for group in _groups_of_variables().values() for name, meaning in group.items()}


@cache
def _groups_of_variables() -> dict[str, dict[str, str]]:
    groups: dict[str, dict[str, str]] = table_beside(__file__)
    return groups


def numeric_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that are set here and change the numbers of a run."""
    patterns = _groups_of_variables()["numerics"]
    return {name: value for name, value in environ.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}


OWN_VARIABLES: Final = (
    *("MINDSPEED_PLAN", "MINDSPEED_TRAIN", "MINDSPEED_TRACE", "MINDSPEED_REPORT", "MINDSPEED_CACHE", "MINDSPEED_CSRC"),
    *("MINDSPEED_JOINED", "MINDSPEED_LAUNCHED", "MINDSPEED_AGREEMENT_TIMEOUT", "MINDSPEED_KEPT_MEMORY", "MINDSPEED_LOCK"),
)
"""Variables of mindspeed that name files of one node, or belong to one process."""

_PACKAGES: Final = {"torch": "torch", "torch_npu": "torch-npu", "transformer_engine": "transformer-engine"}
_OF_PLAN: Final = ("mindspeed", "megatron")
"""Packages whose version a plan is made for; the versions of the others, and Python's, are facts of a machine."""
KINDS: Final = (
    *("version", "operator", "feature", "setting", "level", "world", "model", "training", "data", "argument", "option"),
    *("variable", "source", "target", "patch", "order", "plan"),
)
"""Kinds of facts in the order in which their differences are told."""


def content_of(
    plan: ActivationPlan, catalog: Catalog, variants_of: VariantsOf, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The facts of a plan as this process would carry it out, with the versions that are installed here."""
    operators = {op for name in plan.names if name in catalog.specs for op in catalog.specs[name].ops}
    variants = variants_of(operators, plan.environment.get("platform", ""))  # C++ and torch round differently
    targets = {planned.site.partition(":")[0] for planned in plan.patches if not planned.skipped}
    content = {f"version {name}": version for name, version in installed_versions().items()}
    content |= {f"operator {name}": variant for name, variant in variants.items()}
    content |= plan_facts(plan, catalog)
    content |= {f"variable {name}": environ[name] for name in sorted(environ) if _is_compared(name)}
    content |= _digests("source", _source_modules(plan, catalog))
    content |= _digests("target", {module for module in targets if module.partition(".")[0] == "megatron"})
    return content


def plan_facts(plan: ActivationPlan, catalog: Catalog | None) -> dict[str, str]:
    """List the facts of the resolution; with a catalog the versions of features are those installed here."""
    content = {"level": str(plan.level), "order": ", ".join(plan.names), "plan": plan.digest}
    for feature in (*plan.base, *plan.features):
        provider = (catalog.usable.get(feature.name) if catalog is not None else None) or feature
        content[f"feature {feature.name}"] = f"{provider.distribution} {provider.version}"
        content |= {f"setting {feature.name}.{name}": text_of(value) for name, value in feature.args.items()}
    content |= {f"world {name}": text_of(value) for name, value in plan.world.known().items()}
    content |= {_argument(o.override): text_of(o.override.value) for o in plan.overrides}
    for planned in plan.patches:
        if not planned.skipped:
            key = f"patch {planned.site} by {planned.owner}"
            value = planned.reference or text_of(planned.patch.value)
            content[key] = f"{content[key]}, {value}" if key in content else f"{planned.patch.kind} {value}"
    return content


def installed_versions() -> dict[str, str]:
    """Versions of this process that results depend on, without packages that are not installed."""
    from mindspeed._version import __version__
    from mindspeed.engine.inspection.megatron_copies import megatron_version

    found = {"mindspeed": __version__, "python": platform.python_version(), "megatron": megatron_version()}
    found |= {name: installed_version(distribution, local=True) for name, distribution in _PACKAGES.items()}
    return {name: version for name, version in found.items() if version is not None}


def _source_modules(plan: ActivationPlan, catalog: Catalog) -> set[str]:
    """The module of every replacement, wrapper and mixin, and those beside every feature's own; packages count by version."""
    modules = {planned.reference.partition(":")[0] for planned in plan.patches if planned.reference and not planned.skipped}
    modules = {module for module in modules if module.partition(".")[0] not in _PACKAGES}
    for feature in plan.features:
        row = catalog.usable.get(feature.name)
        if row is not None:
            modules.update(_beside(row.reference.partition(":")[0]))
    return modules


def _is_compared(variable: str) -> bool:
    return variable not in OWN_VARIABLES and any(fnmatchcase(variable, pattern) for pattern in compared_variables())


def digest_of(content: Content) -> str:
    """Equal contents have equal digests."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def diff(first: Content, second: Content) -> list[str]:
    """Keys of the facts that differ, the most telling first: a version before the modules that differ with it."""
    keys = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    if len(keys) > 1:  # its digest says no more than that something differs
        keys = [key for key in keys if key != "plan"]
    return sorted(keys, key=lambda key: (KINDS.index(key.partition(" ")[0]), key))


def kind_of(key: str) -> str:
    """Return the kind of a fact: version, operator, setting ..."""
    return key.partition(" ")[0]


def is_of_machine(key: str) -> bool:
    """Return whether a fact belongs to a machine, not to the plan, such as a version of torch or the variant of an operator."""
    kind, _, name = key.partition(" ")
    return kind in ("operator", "variable") or (kind == "version" and name not in _OF_PLAN)


def describe(key: str, value: str | None) -> str:
    """``ring-attention.window=2`` of a fact; None is a missing one."""
    kind, _, name = key.partition(" ")
    if value is None:
        return f"no {name}" if kind in ("variable", "version") else f"no {kind} {name}"
    return {
        **dict.fromkeys(("setting", "variable", "world"), f"{name}={value}"),
        **dict.fromkeys(("source", "target"), f"{name} with content {value}"),
        "version": f"{name} {value}",
        "operator": f"the operator {name} as {value}",
        "feature": f"{name} of {value}",
        "argument": f"Megatron argument {name}={value}",
        "training": f"train.{name}={value}",
        "patch": f"{name}: {value}",
        "level": f"optimization level {value}",
        "order": f"the features {value or 'none'}",
    }.get(kind, f"{key} {value}")


def describe_value(key: str, value: str | None) -> str:
    """The part of `describe` that distinguishes two values of one fact."""
    kind = key.partition(" ")[0]
    if value is None:
        return "none" if kind not in ("variable", "version") else f"has no {key.partition(' ')[2]}"
    return f"content {value}" if kind in ("source", "target") else value


def text_of(value: object) -> str:
    """Write a value as a fact has it."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _beside(module: str) -> Iterator[str]:
    """A feature's module and, where it lies in a package, its neighbours."""
    yield module
    package = module.rpartition(".")[0]
    found = find_module(module)
    if package and found is not None and found.file is not None:
        yield from (f"{package}.{file.stem}" for file in Path(found.file).parent.glob("*.py") if file.stem != "__init__")


def _digests(kind: str, modules: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in sorted(modules):
        module = find_module(name)
        if module is not None and module.file is not None:
            found[f"{kind} {name}"] = hashlib.blake2b(Path(module.file).read_bytes(), digest_size=8).hexdigest()
    return found


def _argument(override: ArgOverride) -> str:
    return f"argument {override.argument}" + (f" where {override.condition}" if override.condition else "")
