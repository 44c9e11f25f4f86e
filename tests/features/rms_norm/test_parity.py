"""The RMSNorm operator against Megatron's norm, and weights of norms in fp32."""

from typing import Any

import pytest

from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.verification.case import build_case
from mindspeed.workbench.verification.pool import WorkerPool
from tests.features.parity import given, trains

test_the_operator_trains_as_the_norm_of_megatron = trains(
    "rms-norm",
    {"fp32": given(), "bf16": given(dtype="bf16"), "sums its gradient under sequence parallel": given("sequence-parallel")},
)


def types_and_losses(recipe: Any) -> tuple[dict[str, str], list[float]]:
    """Return the types of all parameters by name, and the losses of some steps with a gradient for each parameter."""
    from tests.memory.adam_steps import adam_run

    with adam_run(recipe) as run:
        for step in range(recipe.steps):
            run.train_step(step)
        parameters = dict(run.chunks[0].named_parameters())
        assert all(parameter.main_grad.any() for parameter in parameters.values())
        return {name: str(parameter.dtype) for name, parameter in parameters.items()}, list(run.record.losses.values())


@pytest.mark.parametrize("layers", ["transformer-engine-layers", ""])
def test_norms_of_every_layer_have_weights_in_fp32(pool: WorkerPool, layers: str) -> None:
    settings = {"rms-norm": {"weights_in_fp32": True}}
    world = {"dtype": "bf16", **({"transformer_engine_layers": True} if layers else {})}
    case = build_case(["rms-norm"], [Layer("test", settings=settings, world=world)], tuple(filter(None, [layers])), 1)
    [(types, losses)] = pool.call(types_and_losses, 1, case.recipe, plan=case.plan)
    norms = {name for name in types if "norm" in name}
    assert len(norms) >= 5
    assert {name for name, dtype in types.items() if dtype == "torch.float32"} == norms
    assert len(losses) >= 1
