"""What recomputation leaves of tensors, some layers of which another feature has taken."""

from mindspeed.features.recompute.feature import RecomputeArgs, saved
from mindspeed.job.world import World
from mindspeed.plugins.saved_tensors import SavedTensor, leave

LAYERS = (SavedTensor("layer input", 8, 4), SavedTensor("attention: output", 8, 4), SavedTensor("mlp: activation inner", 32, 4))


def test_block_recomputation_takes_its_layers_beside_those_of_another_feature() -> None:
    args = RecomputeArgs(granularity="full", method="block", num_layers=1)
    others = leave(LAYERS, ("mlp: activation inner",), "recomputed", "activation-recompute", 3)
    left = saved(args, World({"num_layers": 4}), others)
    kept = {tensor.name: tensor.layers for tensor in left if tensor.held == "kept"}
    assert kept == {"layer input": 4, "attention: output": 3}
