"""megatron-fixes: fixes where Megatron assumes Apex, Transformer Engine or a compiler, or weighs a loss wrongly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from mindspeed.files.tables import json_beside
from mindspeed.megatron.fixes.adaptor import AdaptorGuard, belongs_to_adaptor
from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, Patch, Ref, Set, When, Wrap, hookimpl

_HERE: Final = "mindspeed.megatron.fixes"
TABLES: Final[dict[str, list[Any]]] = json_beside(__file__)
"""Patches that Megatron needs beside a device; versions are all where none are given.

``uncompiled`` are functions under megatron.core that it gives to torch.compile at import. ``fixes`` are targets that a
wrapper of this package wraps, and why. ``products`` take a product of numbers with a function that numpy 2 lacks.
``unguarded`` are modules that import triton without asking whether it is installed.
"""


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
        from mindspeed.megatron.fixes.engine import check_engine

        check_engine(self.world)
        self._guard = AdaptorGuard()
        self._guard.install()

    @hookimpl
    def deactivated(self) -> None:
        if self._guard is not None:
            self._guard.remove()
