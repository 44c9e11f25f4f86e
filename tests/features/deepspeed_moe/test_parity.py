"""The layer against its formula, every expert on every token, in one process; with equal groups on both sides."""

from typing import Any

from tests.features.parity import BUCKETS, DTYPES, FULL, TENSOR, Given, given, trains


def tensor(ep: int, expert: int, groups: int, nproc: int, **world: Any) -> Given:
    settings = {"deepspeed-moe": {"groups": groups}, "expert-parallel": {"expert_tensor_size": expert}}
    return given("expert-parallel", *TENSOR, settings=settings, nproc=nproc, ep=ep, tp=2, **world)


test_training_is_that_of_the_formula = trains(
    "deepspeed-moe",
    {
        f"capacity {factor}, {dtype}": given(settings={"deepspeed-moe": {"capacity_factor": factor}}, dtype=dtype, ep=1)
        for factor in (0.5, 1.0, 8.0)
        for dtype in DTYPES
    }
    | {
        f"{ranks} ranks, {dtype}": given("expert-parallel", nproc=ranks, ep=ranks, dtype=dtype)
        for ranks in (2, 4)
        for dtype in DTYPES
    }
    | {
        "tensor ranks with experts of their own": tensor(2, 1, groups=2, nproc=2),
        "tensor ranks that share experts": tensor(1, 2, groups=2, nproc=2),
        "tensor ranks that share experts with biases": tensor(1, 2, groups=2, nproc=2, linear_bias=True),
        "four ranks": tensor(2, 2, groups=4, nproc=4),
        "four ranks with biases": tensor(2, 2, groups=4, nproc=4, linear_bias=True),
        "four ranks with biases, bf16": tensor(2, 2, groups=4, nproc=4, linear_bias=True, dtype="bf16"),
        "stages": given("pipeline-parallel", nproc=2, ep=1, pp=2, vpp=1),
        "chunks": given("pipeline-parallel", "virtual-pipeline", nproc=2, ep=1, pp=2, vpp=2),
        "buckets": given("expert-parallel", *BUCKETS, nproc=4, ep=2),
        "experts recomputed": given(
            "expert-parallel", "recompute", settings={"recompute": {"modules": ("moe",)}}, nproc=2, ep=2
        ),
        "layers recomputed": given("expert-parallel", "recompute", settings=FULL, nproc=2, ep=2),
    },
)
