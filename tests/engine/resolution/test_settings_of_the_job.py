"""What a feature's arguments of Megatron say of the job is known to the conditions of every other feature."""

import pytest

from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
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
