"""Every algorithm of context parallelism against stock Megatron in one process, alone and beside other layouts."""

from typing import Any

import pytest

from tests.conftest import Prove
from tests.features.parity import BUCKETS, COMPRESSED_MASK, FULL, RINGS, TENSOR, Given, cp, given, trains

LATENT = {"multi_latent_attention": True}
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "tensor ranks": (TENSOR, {"tensor-parallel": {"size": 2}}),
    "stages": (("pipeline-parallel",), {"pipeline-parallel": {"size": 2}}),
    "buckets": (BUCKETS, {}),
    "recompute": (("recompute",), FULL),
}


@pytest.mark.long
@pytest.mark.guards(47, processes=True)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", RINGS)
def test_a_share_of_the_sequence_trains_as_the_whole(prove: Prove, algorithm: str, size: int) -> None:
    assert prove(algorithm, settings=cp(size)).problems == []


def beside(layout: str, size: int = 2, nproc: int | None = None, **own: Any) -> Given:
    features, settings = LAYOUTS[layout]
    return given(*features, settings=cp(size, **own, **settings), nproc=nproc)


def everywhere() -> dict[str, Given]:
    """What each algorithm without settings is held to."""
    # beside tensor parallelism Megatron itself loses a part of the gradient of the positions of latent keys
    tensor = given(also=TENSOR, settings=cp(2, **{"tensor-parallel": {"size": 2}}), nproc=4, **LATENT)
    return {
        "rotary positions, few key heads": given("rms-norm", settings=cp(2), normalization="RMSNorm", num_query_groups=2),
        "bf16": given(settings=cp(2), dtype="bf16"),
        "latent": given(settings=cp(2), **LATENT),
        "latent, four ranks": given(settings=cp(4), **LATENT),
        "latent, tensor ranks": tensor,
        **{f"beside {layout}": beside(layout) for layout in LAYOUTS},
    }


def ring(size: int, **settings: Any) -> Given:
    return given(settings=cp(size, **{"ring-attention": settings}), nproc=size, **({"seq_length": 48} if size == 3 else {}))


def ulysses(size: int, **settings: Any) -> Given:
    return given(settings=cp(size, **{"ulysses-attention": settings}), normalization="RMSNorm", num_query_groups=1)


def hybrid(size: int = 4, nproc: int | None = None, own: Any = None, **world: Any) -> Given:
    return given(settings=cp(size, **{"hybrid-attention": {"ulysses_degree": 2, **(own or {})}}), nproc=nproc, **world)


ALL = TENSOR + LAYOUTS["stages"][0], {"tensor-parallel": {"size": 2}, "pipeline-parallel": {"size": 2}}
test_a_ring_trains_as_one_process = trains(
    "ring-attention",
    everywhere()
    | {
        "half kept": ring(2, keep="half", second_communicator=True),
        "double ring": ring(4, window=2, keep="full"),
        "three ranks": ring(3, second_communicator=True),
        "an interval": ring(2, keep="full", interval=1),
        "latent, bf16": given(settings=cp(2), dtype="bf16", **LATENT),
        "replicas, buckets": beside("buckets", nproc=4),
        "eight ranks": given(*ALL[0], settings=cp(2, **ALL[1]), nproc=8),
    },
)
test_ulysses_trains_as_one_process = trains(
    "ulysses-attention",
    everywhere()
    | {f"kept, {size} ranks": ulysses(size, keep="full", interval=1) for size in (2, 4)}
    | {f"gathered, {size} ranks": ulysses(size, keep="half", kv_allgather=True) for size in (2, 4)}
    | {"replicas, buckets": beside("buckets", nproc=4)},
)
test_gathered_keys_train_as_one_process = trains(
    "kv-allgather-cp", everywhere() | {"replicas, recompute": beside("recompute", nproc=4)}
)
HYBRID = {"hybrid-attention": {"ulysses_degree": 2}}
test_neighbours_that_trade_heads_in_a_ring_train_as_one_process = trains(
    "hybrid-attention",
    {
        "four ranks": hybrid(4, nproc=4, own={"window": 1}, seq_length=32),
        "eight ranks": hybrid(8, nproc=8, own={"window": 2}, seq_length=32),
        "kept": hybrid(own={"keep": "full", "interval": 1}),
        "latent": hybrid(**LATENT),
        "replicas, buckets": beside("buckets", 4, nproc=8, **HYBRID),
        "recompute": beside("recompute", 4, nproc=4, **HYBRID),
    },
)
test_adaptive_shares_train_as_one_process_on_four_ranks = trains(
    "adaptive-cp", {layout: beside(layout, nproc=4) for layout in ("tensor ranks", "stages")}
)


@pytest.mark.long
def test_it_keeps_fewer_activations(prove: Prove) -> None:
    whole, shared = prove("ring-attention", settings=cp(2)).proof.bytes["saved activations"]
    assert shared - COMPRESSED_MASK < 0.55 * whole
