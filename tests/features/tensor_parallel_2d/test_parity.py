"""Training on a grid against one process, beside the features that it composes with."""

from typing import Any

import pytest

from tests.conftest import Prove
from tests.features.parity import BUCKETS, DTYPES, FULL, LLAMA, Given, given, trains

NAME = "tensor-parallel-2d"
ONE_COLUMN = f"effect of {NAME}: no function of mindspeed.features.tensor_parallel_2d.products was called"
"""All that verification finds where ranks form one column, whose products are Megatron's."""
OVERLAPS = {"overlap_gather": True, "overlap_scatter": True, "overlap_backward": True}
SELECTIVE = {"recompute": {"granularity": "selective"}}


def grid(*features: str, x: int = 1, y: int = 2, also: Any = (), own: Any = None, more: Any = None, **world: Any) -> Given:
    settings = {NAME: {"x": x, "y": y, **(own or {})}, **(more or {})}
    return given(*features, also=also, settings=settings, **world)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_products_of_one_column_are_megatrons(prove: Prove, dtype: str) -> None:
    problems = prove(NAME, settings={NAME: {"x": 2, "y": 1}}, world={"tp": 2, "dtype": dtype, **LLAMA}).problems
    assert [problem.message for problem in problems] == [ONE_COLUMN]


test_a_grid_trains_as_one_process = trains(
    NAME,
    {
        f"{x} x {y}, {dtype}": grid(x=x, y=y, tp=x * y, dtype=dtype, **LLAMA)
        for x, y in ((1, 2), (2, 2), (1, 4))
        for dtype in DTYPES
    }
    | {f"{x} x 2, in parts": grid(x=x, own=OVERLAPS, tp=2 * x, seq_length=64) for x in (1, 2)}
    | {
        "pipeline": grid("pipeline-parallel", tp=2, seq_length=32, pp=2),
        "Ulysses": grid("ulysses-attention", tp=2, seq_length=32, cp=2),
        "ring": grid("ring-attention", tp=2, seq_length=32, cp=2),
        "buckets": grid(*BUCKETS, tp=2, seq_length=32, world_size=4),
        "matmul-add": grid("matmul-add", tp=2, seq_length=32),
        "experts": grid("expert-parallel", tp=2, seq_length=32, ep=2),
        "multi-token prediction": grid(tp=2, seq_length=32, mtp_num_layers=1),
        "layers recomputed": grid("recompute", more=FULL),
        "attention recomputed": grid("recompute", more=SELECTIVE),
        # against sequence parallelism: Megatron's own differs from one process in multi-latent attention
        "latent": grid(also=["sequence-parallel"], tp=2, seq_length=64, multi_latent_attention=True, rotary=True),
    },
)
