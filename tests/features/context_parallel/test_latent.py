"""Megatron's own multi-latent attention, whose keys are wider than its values, against the formula."""

from typing import Any

import torch
from torch import Tensor

from mindspeed import plan
from mindspeed.workbench.verification.pool import WorkerPool
from tests.context_parallel.shards import causal, dense


class Formula(torch.nn.Module):
    """A core attention that is nothing but the formula. Megatron makes one without widths first, and throws it away."""

    def __init__(
        self, config: Any, softmax_scale: float | None, k_channels: int = 0, v_channels: int = 0, **others: Any
    ) -> None:
        super().__init__()
        self.scale, self.widths = softmax_scale, (k_channels, v_channels)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **others: Any) -> Tensor:
        assert (key.shape[-1], value.shape[-1]) == self.widths
        return dense(query, key, value, causal(query.shape[0]), self.scale).flatten(2)


def both() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Loss and gradients by Megatron's core attention and by `Formula`."""
    return loss_and_gradients(False), loss_and_gradients(True)


def loss_and_gradients(by_formula: bool) -> dict[str, Tensor]:
    """Of one sequence through a small model with Megatron's own layers, its core attention, or `Formula`."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from mindspeed.megatron.module_specs import with_modules
    from tests.megatron.plain_script import fill_weights, make_config, parse

    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    spec = get_gpt_layer_local_spec(multi_latent_attention=True)
    config = make_config(parse(["--latent", "--layers", "2"]))
    chosen = with_modules(spec, {DotProductAttention: Formula}) if by_formula else spec
    model = GPTModel(config, chosen, vocab_size=32, max_sequence_length=24, position_embedding_type="rope")
    fill_weights(model)
    tokens = torch.arange(25)[None] * 7 % 32
    loss = model(tokens[:, :-1], torch.arange(24)[None], causal(24)[None, None], labels=tokens[:, 1:]).mean()
    loss.backward()
    return {"loss": loss.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}


def test_megatrons_core_attention_is_the_formula_also_where_keys_are_wider_than_values(pool: WorkerPool) -> None:
    ((ours, formula),) = pool.call(both, 1, plan=plan(platform="cpu", level=0))
    assert ours.keys() == formula.keys()
    for name, expected in formula.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()), msg=name)
