from __future__ import annotations

import pytest

from mindspeed.plugins import FeatureArgs, MindSpeedError, World
from tests.features.resolving import CATALOG
from tests.moe.configurations import config

NAME = "moe-allgather-dispatcher"


def test_experts_that_are_padded_to_a_capacity_are_refused():
    feature = CATALOG.feature(NAME)(FeatureArgs(), World({}))
    feature.config_ready(config(moe_token_dispatcher_type="allgather"))
    with pytest.raises(MindSpeedError) as error:
        feature.config_ready(config(moe_token_dispatcher_type="allgather", moe_pad_expert_input_to_capacity=True))
    assert str(error.value) == (
        f"MS304 {NAME}: moe_pad_expert_input_to_capacity is set in a model that is being built\n  fix: remove {NAME}"
    )
