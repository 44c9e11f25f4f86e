import pytest

from tests.features.resolving import active, refusals

NAME = "shared-attention-mask"


@pytest.mark.parametrize("algorithm", ["ring-attention", "ulysses-attention", "kv-allgather-cp"])
def test_algorithms_that_take_a_mask_from_the_batch_take_only_a_causal_one_from_here(algorithm):
    assert sorted(active(NAME, algorithm, cp=2, world_size=2)) == sorted(["context-parallel", algorithm, NAME])
    settings = {NAME: {"kind": "prefix", "prefix": 8}}
    (problem,) = refusals(NAME, algorithm, cp=2, settings=settings)
    assert (
        "because each rank must take its part of the mask that shared-attention-mask stores. Only adaptive-cp does this | "
        f"remove {algorithm} and add adaptive-cp to the features"
    ) in problem
    assert active(NAME, algorithm, cp=1, world_size=1, settings=settings)
