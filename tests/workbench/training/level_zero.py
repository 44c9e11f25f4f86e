"""A process that activates optimization level 0 and builds a MoE Llama; prints as JSON what stands where."""

import json
import sys
from importlib import import_module
from typing import Any

import megatron.core  # noqa: F401  first, so that every original is there before the plan

from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.request import Layer
from mindspeed.registry import probe
from mindspeed.workbench.training.config import TrainConfig
from mindspeed.workbench.training.job import make_job

LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation": "silu", "rotary": True}


def operator_features() -> tuple[str, ...]:
    """Level-1 features that are operators and need no context parallelism."""
    known = registry.catalog()
    specs = (known.feature(name).spec for name in known.usable)
    return tuple(spec.name for spec in specs if spec.level == 1 and spec.ops and spec.name != "ring-attention-update")


def patched_by_features() -> list[str]:
    """What these features patch in Megatron."""
    world = LLAMA | {"world_size": 1, "num_experts": 4, "grouped_experts": True}
    names = operator_features()
    plan = registry.resolve([Layer("test", names, world=world, platform="cpu")])
    return sorted({one.site for one in plan.patches if one.owner in names})


def held(site: str) -> Any:
    """What a site holds; None where a module has no such name."""
    module, _, name = site.partition(":")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def level_zero(folder: str) -> ActivationPlan:
    layer = Layer("test", world={"num_experts": 4}, level=0, platform="cpu")
    return make_job([layer], {"test": {"run": folder}}, probe("cpu")).plan


def modules_of(plan: ActivationPlan) -> tuple[list[str], bool]:
    """The classes of all modules of the trainer's model, and whether its gradients are accumulated by a fused kernel."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    from mindspeed.workbench.training.trainer import build_model

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    chunks = build_model(plan.world, TrainConfig())
    modules = {type(module) for chunk in chunks for module in chunk.modules()}
    return sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in modules), chunks[0].config.gradient_accumulation_fusion


def main() -> None:
    sites = patched_by_features()
    before = {site: held(site) for site in sites}
    plan = level_zero(sys.argv[1])
    registry.activate(plan)
    same = {site: held(site) is before[site] for site in sites}
    modules, fused = modules_of(plan)
    found = {"names": plan.names, "same": same, "ground": sorted({one.site for one in plan.patches}.intersection(sites))}
    print(json.dumps(found | {"modules": modules, "fused": fused}))


if __name__ == "__main__":
    main()
