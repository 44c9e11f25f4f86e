"""What a feature's arguments of Megatron say of the job is known to the conditions of every other feature."""

import pytest

from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.problems import Fix, ResolutionError
from mindspeed.registry import resolve

WORLD = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "world_size": 2, "tp": 2}
FULL = {"granularity": "full", "method": "block", "num_layers": 1}


@pytest.mark.parametrize(
    ("features", "settings", "field", "value"),
    [
        ((), {}, "recompute_granularity", "none"),
        (("recompute",), FULL, "recompute_granularity", "full"),
        (("recompute",), FULL, "recompute_method", "block"),
        (("recompute",), {"granularity": "selective", "modules": ("mlp",)}, "recompute_modules", ("mlp",)),
        (("sequence-parallel",), {}, "sequence_parallel", True),
    ],
)
def test_a_setting_that_is_an_argument_of_megatron_is_a_value_of_the_world(features, settings, field, value):
    layer = Layer("API", features=features, settings=dict.fromkeys(features[:1], settings), world=WORLD, level=0)
    assert getattr(resolve([layer], made_up("cpu", "0.16.1")).world, field) == value


@pytest.mark.parametrize(("given", "fits"), [("selective", False), ("full", True), (None, True)])
def test_a_value_that_the_user_gives_and_a_feature_sets_otherwise_is_refused(given, fits):
    world = WORLD | ({} if given is None else {"recompute_granularity": given})
    layer = Layer("API", features=("recompute",), settings={"recompute": FULL}, world=world, level=0)
    if fits:
        assert resolve([layer], made_up("cpu", "0.16.1")).world.recompute_granularity == "full"
        return
    with pytest.raises(ResolutionError) as error:
        resolve([layer], made_up("cpu", "0.16.1"))
    (problem,) = error.value.problems
    assert (problem.code, problem.message) == (
        "MS304",
        "recompute sets recompute_granularity to full, but selective is given",
    )
    assert problem.fix == (Fix.drop_field("recompute_granularity", "API"), Fix.remove_feature("recompute"))
