"""megatron-fixes: fixes where Megatron assumes Apex, Transformer Engine or a compiler, each a patch of its own."""

from __future__ import annotations

from typing import Final

from mindspeed.megatron.fixes.functions import CHECKPOINTS, FIXES, PRODUCT, UNCOMPILED
from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, Patch, Ref, Set, When, Wrap, hookimpl

_HERE: Final = "mindspeed.megatron.fixes"


class MegatronFixes(Feature[FeatureArgs]):
    """Let Megatron run without Apex, Transformer Engine, Triton and, on the CPU, a compiler."""

    spec = FeatureSpec(
        name="megatron-fixes",
        category=Category.PLATFORM,
        level=0,
    )

    @hookimpl
    def patches(self) -> list[Patch]:
        reason = "on the CPU torch.compile needs a C++ compiler and takes longer than the function saves"
        patches: list[Patch] = [
            Wrap(target, f"{_HERE}.{wrapper}", why, when=When(versions) if versions else None)
            for target, versions, wrapper, why in FIXES
        ]
        patches.append(
            Set(
                "megatron.core.transformer.multi_latent_attention:HAVE_TE",
                Ref(f"{_HERE}.layers:HAVE_ENGINE"),
                "the names of Transformer Engine's layers are there without it, as mocks that are no types",
                when=When("<0.17"),
                phase="setup",
                optional=True,
            )
        )
        without = "numpy 2 has no product"
        patches += [
            Wrap(f"{CHECKPOINTS}.{target}", f"{_HERE}.numpy2:{name}", without, when=When("<0.16"), phase="checkpoint")
            for target, name in PRODUCT
        ]
        patches.append(
            Wrap(
                "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding.__init__",
                f"{_HERE}.layers:made_on_host",
                "it opens torch.device with the number of the device, which no torch without an accelerator can make",
                when=When(platform="cpu"),
            )
        )
        patches += [
            Wrap(f"megatron.core.{module}:{name}", f"{_HERE}.layers:uncompiled", reason, when=When(versions, platform="cpu"))
            for module, versions, names in UNCOMPILED
            for name in names.split()
        ]
        return patches
