"""A GPTModel whose tokens count differently, with the chunked loss and with Megatron's."""

from typing import Any

import pytest

import mindspeed
from mindspeed.workbench.verification.pool import WorkerPool
from tests.features.chunked_loss.masked_model import masked_steps
from tests.features.chunked_loss.ranks import largest_differences

pytestmark = pytest.mark.long

NAME = "chunked-loss"


def on_ranks(pool: WorkerPool, ranks: int, sequence_parallel: bool, tied: bool, **settings: Any) -> list[Any]:
    features = [NAME] if settings else []
    plan = mindspeed.plan(
        features=features,
        platform="cpu",
        settings={NAME: settings} if settings else {},
        world={"world_size": ranks, "tp": ranks},
    )
    return list(pool.call(masked_steps, ranks, ranks, sequence_parallel, tied, plan=plan))


@pytest.mark.parametrize(("ranks", "sequence_parallel", "tied"), [(1, False, True), (2, False, False), (2, True, True)])
def test_tokens_count_as_the_script_weighs_them(pool: WorkerPool, ranks: int, sequence_parallel: bool, tied: bool) -> None:
    stock = on_ranks(pool, ranks, sequence_parallel, tied)
    for mode in ("recompute", "accumulate"):
        for found, expected in zip(on_ranks(pool, ranks, sequence_parallel, tied, chunks=4, mode=mode), stock, strict=True):
            assert found.keys() == expected.keys()
            for kind, tensors in found.items():
                assert max(largest_differences(tensors, expected[kind])) <= 1e-6, (mode, kind)
