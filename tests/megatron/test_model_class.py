"""The sharded state of a GPTModel reads the checkpoint of a HybridModel."""

import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from mindspeed.megatron.model_class import point_at_hybrid


def tensor(key: str, layer: int) -> ShardedTensor:
    """The second half of a matrix of one of two layers."""
    return ShardedTensor.from_rank_offsets(key, torch.zeros(2, 3), (0, layer, 2), (1, 1, 2), prepend_axis_num=1)


def placed(entry: ShardedTensor) -> tuple[object, ...]:
    return entry.key, entry.global_shape, entry.global_offset, entry.axis_fragmentations, entry.prepend_axis_num


def test_the_first_axis_becomes_the_number_of_the_layer() -> None:
    attention = tensor("optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight", 1)
    mlp = tensor("decoder.layers.mlp.linear_fc1.weight", 1)
    word = tensor("embedding.word_embeddings.weight", 0)
    before = placed(word)
    point_at_hybrid({"model": {"a": mlp, "b": word}, "optimizer": {"c": [attention]}}, "*-|*-")
    assert placed(mlp) == ("decoder.layers.3.mlp.linear_fc1.weight", (4, 3), (2, 0), (2, 1), 0)
    key = "optimizer.state.exp_avg.decoder.layers.2.self_attention.linear_qkv.weight"
    assert placed(attention) == (key, (4, 3), (2, 0), (2, 1), 0)
    assert placed(word) == before


def test_entries_without_a_tensor_and_ends_of_the_model_have_the_names_of_the_hybrid() -> None:
    state = ShardedObject("decoder.layers.mlp.linear_fc1._extra_state", None, (2,), (0,))
    norm = ShardedTensor.from_rank_offsets("decoder.final_layernorm.weight", torch.zeros(3))
    content = {"state": state, "norm": norm, "output": ShardedObject("output_layer._extra_state", "kept", (1,), (0,))}
    point_at_hybrid({"model": content}, "*-*-")
    assert (state.key, state.global_shape, state.global_offset) == ("decoder.layers.1.mlp.linear_fc1._extra_state", (1,), (0,))
    assert norm.key == "decoder.final_norm.weight"
    assert isinstance(content["output"], LocalNonpersistentObject)


def test_tensors_that_are_cut_when_they_are_read_get_their_layer_then() -> None:
    def halves(key: str, data: torch.Tensor, *_: object) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(key, half, (0, 1, 2), (1, at, 2), prepend_axis_num=1)
            for at, half in enumerate(data)
        ]

    factory = ShardedTensorFactory("decoder.layers.mlp.linear_fc1.weight", torch.zeros(2, 4, 3), halves, lambda parts: parts)
    point_at_hybrid({"model": {"fc1": factory}}, "*-*-")
    assert [placed(part)[:3] for part in factory.build()] == [
        ("decoder.layers.3.mlp.linear_fc1.weight", (8, 3), (0, 0)),
        ("decoder.layers.3.mlp.linear_fc1.weight", (8, 3), (4, 0)),
    ]
