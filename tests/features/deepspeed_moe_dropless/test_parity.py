"""No token is dropped, whatever the layout: against the layer with a capacity that drops none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long

ROOMY: dict[str, dict[str, Any]] = {"deepspeed-moe": {"capacity_factor": 8.0}}


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("rearranged", [False, True])
def test_it_is_the_layer_that_drops_nothing(prove: Prove, padding: bool, rearranged: bool) -> None:
    names = ("deepspeed-moe-dropless", "expert-parallel", *(["deepspeed-moe-rearrange"] if rearranged else []))
    given = ROOMY | {"deepspeed-moe-dropless": {"padding": padding}}
    assert prove(*names, also=["deepspeed-moe"], settings=given, world={"ep": 2}, nproc=2).problems == []


def test_stages_of_a_pipeline_have_maxima_of_their_own(prove: Prove) -> None:
    names = ("deepspeed-moe-dropless", "pipeline-parallel", "expert-parallel")
    assert prove(*names, also=["deepspeed-moe"], settings=ROOMY, world={"pp": 2, "ep": 2}, nproc=4).problems == []
