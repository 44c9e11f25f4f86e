import pytest

from mindspeed import registry
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.problems import ResolutionError
from tests.features.resolving import CATALOG, MODEL

NAME = "adaptive-recompute"


def planned(budget, strict=False, swap=False, also=(), **world):
    layer = Layer(
        "test",
        (NAME, *also),
        {NAME: {"budget_mb": budget, "swap": swap}},
        world=MODEL | {"world_size": 1, "dtype": "bf16", **world},
        strict=strict,
    )
    return registry.resolve([layer], made_up("cpu", "0.16.1"), CATALOG)


def refused(budget, **request):
    with pytest.raises(ResolutionError) as error:
        planned(budget, **request)
    return [f"{problem.code} {problem.message} | {problem.fix_text}" for problem in error.value.problems]


@pytest.mark.parametrize(
    ("request_", "stage", "least"),
    [
        ({}, 0, 10.65),
        ({"swap": True}, 0, 10.48),
        ({"also": ["swap-optimizer"]}, 0, 4.26),
        ({"also": ["transformer-engine-layers"], "transformer_engine_layers": True}, 0, 10.77),
        ({"world_size": 2, "pp": 2}, 0, 5.71),
        ({"num_experts": 4, "router_topk": 2, "moe_ffn_hidden_size": 64}, 0, 9.69),
        ({"also": ["ring-attention"], "world_size": 2, "cp": 2}, 0, 13.62),
    ],
    ids=[
        "alone",
        "swap",
        "optimizer on the host",
        "fused norms",
        "stages",
        "experts: what is certain",
        "the mask of causal blocks",
    ],
)
def test_a_budget_below_the_least_that_the_planner_foretells_is_refused_with_it(request_, stage, least):
    fix = f"--set {NAME}.budget_mb={least:g} or more, or use more tensor or pipeline parallelism"
    text = f"the MiB that stage {stage} needs even if {NAME} frees all that it can"
    below = round(least - 0.01, 2)
    assert refused(below, **request_) == [f"MS304 {NAME}: budget_mb={below:g} is less than {least:g}, {text} | {fix}"]
    assert planned(least, **request_).rows == planned(1000, **request_).rows


def test_a_budget_whose_least_depends_on_a_size_that_nobody_gave_is_not_checked():
    unknown = {"ffn_hidden_size": None, "num_experts": None}
    unchecked = "the memory limit budget_mb=1 (MiB) cannot be checked, because the model's memory is unknown"
    text = f"{unchecked}; give --ffn-hidden-size, --num-experts"
    assert [row.line() for row in planned(1, **unknown).rows if row.kind == "not-checked" and row.feature == NAME] == [text]
    expected = f"MS307 {NAME}: {unchecked} | --ffn-hidden-size N --num-experts N"
    assert expected in refused(1, strict=True, **unknown)
