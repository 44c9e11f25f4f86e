import pytest
import torch

import mindspeed
from mindspeed import registry
from mindspeed.context_parallel import blocks
from mindspeed.engine.patching.apply import apply
from mindspeed.engine.resolution.request import Layer
from mindspeed.features.ring_attention_update import layers
from mindspeed.features.ring_attention_update.feature import RingAttentionUpdate
from mindspeed.ops import npu_ring_attention_update
from mindspeed.plugins import FeatureArgs, Field
from tests.ops.operator_checks import randn
from tests.plugins.synthetic import CPU, catalog, make


class BlocksArgs(FeatureArgs):
    size: int = Field(2, description="ranks")


ALGORITHM = make("blocks", args=BlocksArgs, sizes={"cp": "size"}, slots={"context-parallel"})


def in_blocks(count):
    """Causal attention of the last tokens of a sequence over all of its keys, in ``count`` blocks, as a ring has it."""
    q, k, v = (randn(12, 2, heads, 4, seed=n, grad=False) for n, heads in enumerate((4, 2, 2)))
    rule, mine, size = blocks.Scoring(scale=0.5), [(8, 12)], 12 // count
    running = blocks.start(q[8:], 4)
    for first in range(0, 12, size):
        for part in blocks.parts(rule, mine, [(first, first + size)], q.device):
            blocks.accumulate_block(running, rule, part, q[8:], k[first : first + size], v[first : first + size])
    return running.out


def test_beside_an_algorithm_it_puts_the_operator_into_the_merge_and_takes_it_out_again(monkeypatch):
    calls: list[int] = []

    def counted(*sides, **how):
        calls.append(1)
        return npu_ring_attention_update(*sides, **how)

    monkeypatch.setattr(layers, "npu_ring_attention_update", counted)
    plain = blocks.merge
    layer = Layer("test", features=("ring-attention-update",), world={"cp": 2, "world_size": 2})
    plan = registry.resolve([layer], CPU, catalog(RingAttentionUpdate, ALGORITHM))
    assert plan.names == ("blocks", "ring-attention-update")
    applied = apply([planned for planned in plan.patches if planned.owner == "ring-attention-update"])
    try:
        merged = in_blocks(3)
    finally:
        applied.undo()
    assert len(calls) == 2  # the first block is written, not merged
    assert blocks.merge is plain
    torch.testing.assert_close(in_blocks(3), merged)
    torch.testing.assert_close(in_blocks(1), merged)
    assert len(calls) == 2  # the first block is written, not merged


@pytest.mark.parametrize(
    ("algorithm", "merges"),
    [("ring-attention", True), ("ulysses-attention", False), ("kv-allgather-cp", False)],
)
def test_level_1_leaves_it_out_where_no_blocks_are_merged(algorithm, merges):
    world = {"world_size": 4, "cp": 4, "seq_length": 64, "num_attention_heads": 4}
    plan = mindspeed.plan([algorithm], world=world, platform="cpu")
    assert ("ring-attention-update" in plan.names) is merges
