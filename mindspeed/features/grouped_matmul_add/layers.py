"""Products and activation of Megatron's grouped experts, and their place in its specs.

R rows of tokens, sorted by expert; H hidden size, F size of an expert's activation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from mindspeed.ops.npu_gmm import npu_gmm
from mindspeed.plugins import with_modules


class AccumulatingExperts:
    """Stands before ``GroupedMLP``: the same parameters and checkpoints, another forward pass."""

    def __init__(self, num_local_experts: int, config: Any, submodules: Any = None, **groups: Any) -> None:
        """``submodules`` are those of single experts, which a spec keeps when they are exchanged for grouped ones."""
        super().__init__(num_local_experts, config, **groups)  # type: ignore[call-arg]
        self.is_megatrons = bool(misfits(config))

    def forward(
        self: Any, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Give the experts' answers [R, H] to ``permuted_local_hidden_states`` [R, H], weighed by ``permuted_probs`` [R]."""
        if self.is_megatrons:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)  # type: ignore[misc, no-any-return]
        x_RH, probs_R1 = permuted_local_hidden_states, permuted_probs.unsqueeze(-1)
        ends = tokens_per_expert.to(x_RH.device, torch.int64).cumsum(0)
        if self.config.moe_apply_probs_on_input:
            x_RH, probs_R1 = (x_RH * probs_R1).to(x_RH.dtype), torch.ones_like(probs_R1)
        h = product(x_RH, self.weight1, ends)
        activate = partial(activation, self.config)
        if not self.activation_recompute:
            return product(activate(h, probs_R1), self.weight2, ends), None
        from megatron.core.tensor_parallel import CheckpointWithoutOutput

        self.activation_checkpoint = CheckpointWithoutOutput()
        a_RF = self.activation_checkpoint.checkpoint(activate, h, probs_R1)
        y_RH = product(a_RF, self.weight2, ends)
        self.activation_checkpoint.discard_output_and_register_recompute(y_RH)
        return y_RH, None


def activation(config: Any, h: Tensor, probs_R1: Tensor) -> Tensor:
    """The activation [R, F] of ``h``, [R, 2F] where it is gated, times one weight per row: as Megatron's single experts
    compute it, not as its grouped ones, which compile it for every layer and every number of rows."""
    active: Tensor
    if not config.gated_linear_unit:
        active = config.activation_func(h) * probs_R1
    elif config.bias_activation_fusion and config.activation_func is silu:
        from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

        active = weighted_bias_swiglu_impl(h, None, probs_R1)
    else:
        gate, up = h.chunk(2, dim=-1)
        active = config.activation_func(gate) * up * probs_R1
    return active.to(h.dtype)


def product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows times the matrix of their expert: ``x`` [R, I] and ``weight``, Megatron's two-dimensional parameter of E x I x O
    numbers, give [R, O]. ``ends`` [E] are the last rows of the experts, plus one.

    In backward the product adds to the weight's ``main_grad`` where that is fp32 and Megatron's hooks ask whether it did.
    """
    by_expert = weight.view(ends.shape[0], x.shape[-1], -1)
    buffer = getattr(weight, "main_grad", None)
    fused = buffer is not None and buffer.dtype == torch.float32 and hasattr(weight, "grad_added_to_main_grad")
    return npu_gmm(x, by_expert, group_list=ends, gemm_fusion=fused, original_weight=weight)


def is_available() -> bool:
    """Answer Megatron that grouped products can be computed."""
    return True


def misfits(config: Any) -> list[str]:
    """Give the reasons why the operators cannot compute experts of a configuration, option by option; empty if they can."""
    wrong = {
        "add_bias_linear is set": config.add_bias_linear,
        # since Megatron 0.15 and 0.16
        "activation_func_clamp_value is set": getattr(config, "activation_func_clamp_value", None) is not None,
        "glu_linear_offset is set": getattr(config, "glu_linear_offset", 0.0) != 0.0,
        "moe_latent_size is set": getattr(config, "moe_latent_size", None) is not None,
        "moe_apply_probs_on_input is set and moe_router_topk is not 1": (
            config.moe_apply_probs_on_input and config.moe_router_topk != 1
        ),
    }
    return [sentence for sentence, holds in wrong.items() if holds]


def fits(config: Any) -> bool:
    """Tell whether a configuration has experts that the operators compute."""
    return bool(config.num_moe_experts) and not misfits(config)


def with_grouped_experts(spec: Any) -> Any:
    """The spec of a block with single experts exchanged for grouped ones."""
    from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP

    return with_modules(spec, {SequentialMLP: GroupedMLP})
