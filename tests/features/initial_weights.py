"""The weights with which a tiny model begins when Megatron draws them: runs in a worker of the pool."""

from unittest import mock

import numpy as np
from megatron.core import tensor_parallel

from mindspeed.workbench.verification import model
from mindspeed.workbench.verification.placement import pieces_of, placed_parameters
from mindspeed.workbench.verification.shape import Recipe

SEED = 1234


def initial_weights(recipe: Recipe) -> dict[str, tuple[str, float]]:
    """Map the name and place of every weight of this rank to its content in short: bytes of a few values, and the sum."""
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    config = model.model_config

    def drawn(recipe: Recipe):
        made = config(recipe)
        made.perform_initialization = True
        return made

    with mock.patch.object(model, "model_config", drawn), mock.patch.object(model, "fill_weights"):
        chunks = model.build_chunks(recipe)
    pieces = [piece for placed in placed_parameters(chunks) for piece in pieces_of("weight", placed, placed.parameter)]
    return {f"{piece.name} {piece.index}": (piece.values.tobytes().hex()[:64], float(np.sum(piece.values))) for piece in pieces}
