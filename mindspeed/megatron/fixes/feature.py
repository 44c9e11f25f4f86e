"""megatron-fixes: fixes where Megatron assumes Apex, Transformer Engine or a compiler, or weighs a loss wrongly."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final

from pydantic import field_validator

from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.environment import ENGINE, engine_origin, version_in
from mindspeed.files.tables import json_beside
from mindspeed.megatron.fixes.adaptor import AdaptorGuard, belongs_to_adaptor
from mindspeed.plugins import (
    Category,
    Feature,
    FeatureArgs,
    FeatureSpec,
    Field,
    Patch,
    Ref,
    Replace,
    Set,
    SettingsError,
    When,
    World,
    Wrap,
    hookimpl,
)
from mindspeed.problems import Fix, PlatformError, Problem, near_names

_HERE: Final = "mindspeed.megatron.fixes"
TABLES: Final[dict[str, list[Any]]] = json_beside(__file__)
"""Patches that Megatron needs beside a device; versions are all where none are given.

``uncompiled`` are functions under megatron.core that it gives to torch.compile at import. ``fixes`` are targets that a
wrapper of this package wraps, why, and which bug of ``mindspeed bugs`` that mends. ``products`` take a product of numbers with
a function that numpy 2 lacks. ``unguarded`` are modules that import triton without asking whether it is installed.
"""


_BUG_OF: Final[dict[tuple[str, str], str]] = {(row["target"], f"{_HERE}.{row['by']}"): row["bug"] for row in TABLES["fixes"]}
"""By a target and the wrapper on it the bug that this mends."""
MENDED: Final = frozenset(_BUG_OF.values())
"""Known bugs of Megatron that a patch mends in some release, by name."""


def mended_bugs(version: str) -> set[str]:
    """Return the names of the bugs that every plan mends in a release of Megatron, except those left unmended."""
    return {row["bug"] for row in TABLES["fixes"] if version_in(version, row.get("versions", ""))}


def bugs_mended_by(plan: ActivationPlan) -> set[str]:
    """Return the names of the bugs that the patches of a plan mend."""
    applied = {(planned.patch.target, planned.reference or "") for planned in plan.patches if not planned.skipped}
    return {bug for patch, bug in _BUG_OF.items() if patch in applied}


class MegatronFixesArgs(FeatureArgs):
    unmended: tuple[str, ...] = Field(
        (), description="Known bugs of Megatron to leave unmended, as `mindspeed bugs` names them"
    )

    @field_validator("unmended")
    @classmethod
    def _bugs_are_mended(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in MENDED:
                fixes = [Fix.rename(name, near) for near in near_names(name, MENDED)] or [Fix.run_command("mindspeed bugs")]
                raise SettingsError(f"no plan mends a bug named {name}", *fixes, Fix.drop_setting("unmended"))
        return names


class MegatronFixes(Feature[MegatronFixesArgs]):
    """Let Megatron run without Apex, Transformer Engine, Triton and, on the CPU, a compiler.

    With a loss per token, losses of routers weigh what is configured in every layout.
    """

    spec = FeatureSpec(
        name="megatron-fixes",
        category=Category.PLATFORM,
        level=0,
    )

    _guard: AdaptorGuard | None = None

    @hookimpl
    def patches(self) -> list[Patch]:
        return [patch for patch in self._every_patch() if not belongs_to_adaptor(patch.target)]

    @hookimpl
    def notes(self) -> Iterable[str]:
        kept = [patch.target for patch in self._every_patch() if belongs_to_adaptor(patch.target)]
        if kept:
            yield f"megatron_adaptor was imported first and keeps what it patches: {', '.join(kept)}"
        if self.args.unmended:
            yield f"leaves known bugs of Megatron as they are: {', '.join(self.args.unmended)}"

    def _every_patch(self) -> list[Patch]:
        reason = "disables torch.compile on the CPU, where it needs a C++ compiler and takes longer than it saves"
        patches: list[Patch] = [
            Wrap(
                row["target"],
                f"{_HERE}.{row['by']}",
                row["reason"],
                when=_guard(row),
                phase=row.get("phase", "step"),
            )
            for row in TABLES["fixes"]
            if row["bug"] not in self.args.unmended
        ]
        patches.append(
            Set(
                "megatron.core.transformer.multi_latent_attention:HAVE_TE",
                Ref(f"{_HERE}.layers:HAVE_ENGINE"),
                "replaces mocks of Transformer Engine's classes by types, where it is not installed",
                when=When("<0.17"),
                phase="setup",
                optional=True,
            )
        )
        patches.append(
            Wrap(
                "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_with_transformer_engine_spec",
                f"{_HERE}.layers:only_with_engine",
                "tells how to get Transformer Engine's layers where it is not installed",
                phase="build",
                optional=True,
            )
        )
        patches.append(
            Replace(
                "megatron.core.utils:local_multi_tensor_scale",
                f"{_HERE}.optimizer:scale_into",
                "clips gradients in place; without Apex, Megatron clips a copy of each and copies it back",
                optional=True,
            )
        )
        without = "adds numpy.product, which numpy 2 has removed"
        patches += [
            Wrap(row["target"], f"{_HERE}.{row['by']}", without, when=When("<0.16"), phase="checkpoint")
            for row in TABLES["products"]
        ]
        patches.append(
            Wrap(
                "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding.__init__",
                f"{_HERE}.layers:made_on_host",
                "accepts torch.device with a device number, which torch without an accelerator refuses",
                when=When(platform="cpu"),
            )
        )
        for row in TABLES["uncompiled"]:
            when = When(row.get("versions"), platform="cpu")
            targets = (f"megatron.core.{row['module']}:{name}" for name in row["names"].split())
            patches += (Wrap(target, f"{_HERE}.layers:uncompiled", reason, when=when) for target in targets)
        return patches

    @hookimpl
    def activated(self) -> None:

        check_engine(self.world)
        self._guard = AdaptorGuard()
        self._guard.install()

    @hookimpl
    def deactivated(self) -> None:
        if self._guard is not None:
            self._guard.remove()


def _guard(row: dict[str, Any]) -> When | None:
    """Return the guard of a fix; None where it is for every release, whatever code that has."""
    guard = When(row.get("versions"), recorded=row.get("recorded", False))
    return guard if guard != When() else None


def check_engine(world: World) -> None:
    """Import the Transformer Engine whose layers a job builds, and refuse one that the plan does not know.

    Raises PlatformError with MS339.
    """
    planned, replaced = world.is_set("engine_installed"), world.is_set("engine_over_local")
    if replaced and not planned and (found := engine_origin()) is not None:
        text = f"the plan was made without Transformer Engine, but it is installed now: {found}"
        fix = Fix.advise("make the plan again; it then uses Transformer Engine")
        raise PlatformError([Problem("MS339", text, where=found, fix=fix)])
    if planned and not replaced and world.is_set("transformer_engine_layers"):
        _import_engine()


def _import_engine() -> None:
    try:
        import_module(f"{ENGINE}.pytorch")
    except Exception as error:  # a build for another device fails by whatever its libraries raise
        text = "the job builds Transformer Engine's layers, but the installed Transformer Engine cannot be imported"
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        fix = Fix.advise("repair or uninstall Transformer Engine; without it, mindspeed builds compatible layers")
        raise PlatformError([Problem("MS339", text, chain=(cause,), where=engine_origin() or ENGINE, fix=fix)]) from error
