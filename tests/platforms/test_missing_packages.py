from typing import Any

import pytest

from mindspeed.job.derivations import transformer_engine_experts
from mindspeed.job.world import World
from mindspeed.platforms.missing_packages import GROUPED_EXPERTS

GROUPED = {"num_experts": 4, "moe_grouped_gemm": True}
ENGINE = {"transformer_impl": "transformer_engine"}
LEGACY = {"moe_use_legacy_grouped_gemm": True}


@pytest.mark.parametrize(
    ("values", "release", "needed"),
    [
        (GROUPED | ENGINE, "0.16.1", False),
        (GROUPED | ENGINE | LEGACY, "0.16.1", True),
        (GROUPED | {"transformer_impl": "local"}, "0.16.1", True),
        (GROUPED | {"transformer_impl": "local"}, "0.17.1", False),
        (GROUPED, "0.16.1", False),
        (ENGINE | LEGACY | {"num_experts": 4}, "0.16.1", False),
    ],
)
def test_the_package_of_legacy_grouped_experts_is_needed_by_either_kind_of_layers(
    values: dict[str, Any], release: str, needed: bool
) -> None:
    derived = {} if (experts := transformer_engine_experts(values, ())) is None else {"transformer_engine_experts": experts}
    grouped = bool(values.get("moe_grouped_gemm"))
    world = World({"num_experts": values["num_experts"], "grouped_experts": grouped, "megatron": release} | derived)
    assert GROUPED_EXPERTS.when is not None
    assert GROUPED_EXPERTS.when(None, world) is needed
