"""megatron-fixes: fixes where Megatron assumes Apex, Transformer Engine or a compiler, or weighs a loss wrongly."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final

from mindspeed.engine.resolution.environment import ENGINE, engine_origin, version_in
from mindspeed.files.tables import json_beside
from mindspeed.megatron.fixes.adaptor import AdaptorGuard, belongs_to_adaptor
from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, Patch, Ref, Set, When, World, Wrap, hookimpl
from mindspeed.problems import Fix, PlatformError, Problem

_HERE: Final = "mindspeed.megatron.fixes"
TABLES: Final[dict[str, list[Any]]] = json_beside(__file__)
"""Patches that Megatron needs beside a device; versions are all where none are given.

``uncompiled`` are functions under megatron.core that it gives to torch.compile at import. ``fixes`` are targets that a
wrapper of this package wraps, and why. ``products`` take a product of numbers with a function that numpy 2 lacks.
``unguarded`` are modules that import triton without asking whether it is installed.
"""


def fixed_targets(version: str) -> set[str]:
    """Return what the fixes patch in a release of Megatron."""
    return {row["target"] for row in TABLES["fixes"] if "versions" not in row or version_in(version, row["versions"])}


class MegatronFixes(Feature[FeatureArgs]):
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

    def _every_patch(self) -> list[Patch]:
        reason = "disables torch.compile on the CPU, where it needs a C++ compiler and takes longer than it saves"
        patches: list[Patch] = [
            Wrap(
                row["target"],
                f"{_HERE}.{row['by']}",
                row["reason"],
                when=When(row["versions"]) if "versions" in row else None,
                phase=row.get("phase", "step"),
            )
            for row in TABLES["fixes"]
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
