"""A whole model with the bias against one whose core attention is the formula, written here."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed import plan
from mindspeed.workbench.verification.pool import WorkerPool
from tests.context_parallel.shards import causal, dense

SLOPES = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
HEADS, LENGTH = 6, 24


class Formula(torch.nn.Module):
    """Core attention by the formula, in fp64; Megatron's constructor."""

    def __init__(self, config: Any, **others: Any) -> None:
        super().__init__()
        self.slopes = torch.tensor(SLOPES, dtype=torch.float64)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **others: Any) -> Tensor:
        place = torch.arange(query.shape[0])
        bias = -self.slopes[:, None, None] * (place[:, None] - place).abs()
        wide = (x.double() for x in (query, key, value))
        return dense(*wide, causal(query.shape[0]), None, bias).flatten(2).to(query.dtype)


def loss_and_gradients(by_formula: bool) -> dict[str, Tensor]:
    """Of one sequence through a small model. Without the formula it is built as any script builds it."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mindspeed.megatron.module_specs import with_modules
    from mindspeed.workbench.verification.placement import fill_weights

    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    sizes = {"num_layers": 2, "hidden_size": 8 * HEADS, "num_attention_heads": HEADS, "num_query_groups": 2}
    config = TransformerConfig(**sizes, attention_dropout=0.0, hidden_dropout=0.0, masked_softmax_fusion=False)
    spec: Any = get_gpt_layer_local_spec()
    given = {"position_embedding_type": "none"} if by_formula else {}
    spec = with_modules(spec, {DotProductAttention: Formula}) if by_formula else spec
    model = GPTModel(config, spec, vocab_size=32, max_sequence_length=LENGTH, **given)
    fill_weights([model], 3)
    tokens = torch.arange(LENGTH + 1)[None] * 7 % 32
    mask = causal(LENGTH)[None, None]
    loss = model(tokens[:, :-1], torch.arange(LENGTH)[None], mask, labels=tokens[:, 1:]).mean()
    loss.backward()
    result = {"loss": loss.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}
    for module in list(model.modules()):
        vars(module).clear()
    gc.collect()
    return result


@pytest.mark.parametrize("fused", [True, False])
def test_a_model_is_that_of_the_formula_and_has_no_table_of_positions(pool: WorkerPool, fused: bool) -> None:
    world = {"world_size": 1, "rotary": False, "num_attention_heads": HEADS}
    without = ["matmul-add", *([] if fused else ["flash-attention"])]
    ours = plan(["alibi"], settings={"alibi": {"fused": fused}}, without=without, platform="cpu", world=world)
    (found,) = pool.call(loss_and_gradients, 1, False, plan=ours)
    (expected,) = pool.call(loss_and_gradients, 1, True, plan=plan(platform="cpu", level=0))
    assert found.keys() == expected.keys()
    assert not any("position" in name for name in found)
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()), msg=name)
