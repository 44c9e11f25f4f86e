"""The operations of a step by the shape of the model that Megatron has built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.utils import get_model_config, unwrap_model

from mindspeed import plugins as ms
from mindspeed.job.arithmetic import model_flops, shape_of_config


def model_operations(chunks: Sequence[Any], world: ms.World) -> int | None:
    """Return the operations of a step, all ranks together; None where the model is no GPT or hybrid of the same layers,
    or the batch size is not known."""
    model = unwrap_model(chunks[0])
    if not hasattr(model, "vocab_size") or not world.knows("global_batch_size"):
        return None
    length = world.seq_length if world.knows("seq_length") else model.max_sequence_length
    tied = bool(model.share_embeddings_and_output_weights)
    pattern = getattr(model, "hybrid_layer_pattern", None) or ""
    try:
        shape = shape_of_config(get_model_config(chunks[0]), model.vocab_size, length, tied, pattern=pattern)
    except ms.UnknownValue:  # layers whose operations are not counted
        return None
    return model_flops(shape, world.global_batch_size)
