"""What the tests of wrong masks run on every rank."""

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.enums import AttnMaskType

from mindspeed.problems import MindSpeedError
from mindspeed.workbench.verification.model import build_chunks
from mindspeed.workbench.verification.shape import Recipe


def refusal(recipe: Recipe, rows: int, columns: int) -> str:
    """What the core attention of Megatron's first layer says to a general mask of this shape."""
    tensor_parallel.model_parallel_cuda_manual_seed(recipe.seed, force_reset_rng=True)
    (chunk,) = build_chunks(recipe)
    core: Any = next(module for name, module in chunk.named_modules() if name.endswith("core_attention"))
    tokens = recipe.shape.seq_length // parallel_state.get_context_parallel_world_size()
    width = recipe.shape.hidden_size // recipe.shape.num_attention_heads
    query = torch.zeros(tokens, 1, recipe.shape.num_attention_heads, width)
    key = torch.zeros(tokens, 1, recipe.shape.num_query_groups, width)
    try:
        core(query, key, key, torch.zeros(1, 1, rows, columns, dtype=torch.bool), AttnMaskType.padding)
    except MindSpeedError as error:
        return str(error)
    return "not refused"
