"""Recomputation of few activations against Megatron without it: equal bits."""

from tests.features.parity import Given, given, trains


def few(*also: str, limit: int = 1, nproc: int = 4, **world: int) -> Given:
    return given(also=also, settings={"recompute-in-bubble": {"limit": limit}}, nproc=nproc, **{"pp": 2, **world})


test_few_kept_activations_are_megatrons = trains(
    "recompute-in-bubble",
    {f"limit {limit}": few("virtual-pipeline", limit=limit, nproc=2, vpp=2, global_batch_size=16) for limit in (1, 2, 3)}
    | {
        "sequence parallel": few("virtual-pipeline", "sequence-parallel", tp=2, vpp=2, num_layers=8, global_batch_size=8),
        "four stages": few("pipeline-parallel", pp=4, num_layers=8, global_batch_size=8),
        "ring": few("pipeline-parallel", "ring-attention", cp=2, num_layers=8, global_batch_size=8),
    },
)
