"""Every other feature on layers in the roles of Transformer Engine's: it holds, or a declared condition refuses it."""

from __future__ import annotations

from typing import Final

import pytest

from mindspeed.plugins.problems import MindSpeedError
from tests.conftest import Prove
from tests.features.resolving import CATALOG

NAME: Final = "transformer-engine-layers"
REFUSED: Final = {
    "norm-recompute": "norms are parts of the linear layers that follow them, and norm-recompute recomputes norms of their own",
    "swap-attention": "linear_qkv contains the norm, whose input the residual needs too",
}
"""Features that a declared condition refuses with their defaults, and its sentence."""
STATES_BY_ORDER: Final = ("reuse-fp32-param", "swap-optimizer")
"""Features whose proof compares states of the optimizer by the order of parameters, which these layers have in another one."""


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(CATALOG.usable) - {NAME}))
def test_a_feature_holds_on_these_layers_or_is_refused(prove: Prove, name: str) -> None:
    if name in REFUSED:
        with pytest.raises(MindSpeedError) as caught:
            prove(name, NAME)
        assert [problem.message for problem in caught.value.problems] == [f"{name}: {REFUSED[name]}"]
        return
    verdict = prove(name, also=(NAME,)) if name in STATES_BY_ORDER else prove(name, NAME)
    assert verdict.problems == []


@pytest.mark.long
def test_attention_is_offloaded_without_the_layer_that_has_the_norm(prove: Prove) -> None:
    settings = {"swap-attention": {"modules": ("core_attention", "linear_proj")}}
    assert prove("swap-attention", NAME, settings=settings).problems == []
