"""cpu-platform: what ``torch.cuda`` and the nccl backend mean on a machine without an accelerator.

The tables of ``cpu.yaml`` are the whole list of what is patched; the modules ``cpu_*`` and ``collective_*`` beside
this file hold what is put there. A device tensor is an ordinary CPU tensor, a host tensor one whose storage is marked,
a stream runs in program order, the device random generator is torch's default generator, and nccl is gloo.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from mindspeed import plugins as ms
from mindspeed.files.tables import table_beside
from mindspeed.platforms.missing_packages import GROUPED_EXPERTS, OFFLOADING, PRECISION_AWARE

_HERE: Final = "mindspeed.platforms"
_C10D: Final = "torch.distributed.distributed_c10d"

_TABLES: Final[dict[str, Any]] = table_beside(__file__)
_NCCL_GROUPS: Final = (f"{_C10D}:ProcessGroupNCCL", "torch.distributed:ProcessGroupNCCL")
_OPTIONS: Final = "defines the class of NCCL group options, which scripts create but torch without CUDA lacks"

COLLECTIVES: Final = tuple(_TABLES["collectives"]["names"].split())
"""Functions of torch.distributed that move tensors."""


@ms.condition(
    "local layers on the CPU use torch's LayerNorm, which has no zero-centered weight",
    fix=(ms.Fix.give_field("zero_centered_norm", False), ms.Fix.give_field("normalization", "RMSNorm")),
)
def norm_is_not_zero_centered(args: Any, world: ms.World) -> bool:
    """Check that a LayerNorm does not have zero-centered weights."""
    return world.is_set("engine_over_local") or not world.is_set("zero_centered_norm") or world.normalization != "LayerNorm"


GRADIENTS_ARE_NOT_DEFERRED: Final = ms.Condition.unset(
    "deferred_embedding_gradients",
    "Megatron defers the weight gradient of the output layer (defer_embedding_wgrad_compute) only with "
    "gradient_accumulation_fusion, whose kernel needs CUDA",
    (ms.Fix.give_field("deferred_embedding_gradients", False),),
)


class CpuPlatform(ms.Feature[ms.FeatureArgs]):
    """Run code written for CUDA and NCCL on the CPU with gloo."""

    spec = ms.FeatureSpec(
        name="cpu-platform",
        category=ms.Category.PLATFORM,
        level=0,
        platforms={"cpu"},
        constraints=(norm_is_not_zero_centered, GRADIENTS_ARE_NOT_DEFERRED, GROUPED_EXPERTS, OFFLOADING, PRECISION_AWARE),
    )

    _prints_crashes = False

    @ms.hookimpl
    def megatron_args(self) -> list[ms.ArgOverride]:
        return [ms.ArgOverride(**row) for row in _TABLES["arguments"]]

    @ms.hookimpl
    def patches(self) -> list[ms.Patch]:
        patches: list[ms.Patch] = [ms.Set(f"{_HERE}:ACTIVE", "cpu", "a process can use only one platform", phase="setup")]
        for row in _TABLES["replaced"]:
            module, glue = row["module"], f"{_HERE}.{row['by']}"
            patches += (ms.Replace(f"{module}:{name}", f"{glue}:{name}", row["reason"]) for name in row["names"].split())
        patches.append(
            ms.Set(
                "torch.cuda:_initialized", True, "reports that CUDA is initialized, because scripts written for CUDA ask for it"
            )
        )
        patches += (ms.Set(row["target"], ms.Ref(f"{_HERE}.{row['to']}"), row["reason"]) for row in _TABLES["set"])
        types, reason = _TABLES["types"]["names"].split(), _TABLES["types"]["reason"]
        patches += (ms.Set(f"torch.cuda:{name}", ms.Ref(f"torch:{name}"), reason) for name in types)
        patches += (
            ms.Set(target, ms.Ref(f"{_HERE}.cpu_nccl:ProcessGroupNCCL"), _OPTIONS, optional=True) for target in _NCCL_GROUPS
        )
        for row in _TABLES["wrapped"]:
            patches += _wraps(row["prefix"], row["by"], row["reason"], row["names"].split())
        return patches + _wraps(f"{_C10D}:", "collectives:counted", _TABLES["collectives"]["reason"], COLLECTIVES)

    @ms.hookimpl
    def activated(self) -> None:
        if sys.__stderr__ is not None and not faulthandler.is_enabled():
            with suppress(OSError, ValueError, RuntimeError):  # a stream without a file
                faulthandler.enable(sys.__stderr__)  # who reads a storage that is away ends the process: Python prints the line
            self._prints_crashes = faulthandler.is_enabled()
        _forget_rules_of_compiler()

    @ms.hookimpl
    def deactivated(self) -> None:
        _forget_rules_of_compiler()
        if self._prints_crashes:
            faulthandler.disable()
            self._prints_crashes = False


def _forget_rules_of_compiler() -> None:
    """Let torch's compiler find torch's functions again: it caches those that it knows, which activation exchanges."""
    if (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        rules.clear_lru_cache()


def _wraps(prefix: str, wrapper: str, reason: str, names: Iterable[str]) -> list[ms.Patch]:
    return [ms.Wrap(f"{prefix}{name}", f"{_HERE}.{wrapper}", reason) for name in names]
