"""The experts of a rank as one module of Megatron: two parameters, grouped products, checkpoints of single experts.

R rows of tokens, sorted by expert; E experts of this rank, H hidden size, F size of an expert's activation.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import experts as megatron_experts
from torch import Tensor
from torch.nn.functional import silu

from mindspeed.megatron.module_specs import with_parts
from mindspeed.moe.expert_checkpoint import IGNORED_KEY, refuse_other_experts, sharded_experts
from mindspeed.moe.overlap import ExpertCall, Redispatch
from mindspeed.moe.products import Operands, Weight, deferred, grouped_product, weight_gradient


class ExpertProducts:
    """Outputs of local experts by grouped products, whose `weights` a subclass lets enter the graph."""

    config: Any
    activation_recompute: bool

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the experts' outputs [R, H] for ``permuted_local_hidden_states`` [R, H], times ``permuted_probs`` [R] if
        given.

        ``tokens_per_expert`` [E] are counts, on any device, or a call of `mindspeed.moe.overlap` that brings the rows itself.
        """
        if isinstance(tokens_per_expert, ExpertCall):
            return tokens_per_expert.answer(self), None
        x_RH = permuted_local_hidden_states
        ends = tokens_per_expert.to(x_RH.device, torch.int64, non_blocking=True).cumsum(0)
        return self.products(x_RH, lambda: permuted_probs, ends, self.weights()), None

    @abstractmethod
    def weights(self) -> tuple[Weight, Weight]:
        """Let the weights of both layers enter the graph here."""

    def products(
        self,
        x_RH: Tensor,
        probs: Callable[[], Tensor | None],
        ends: Tensor,
        weights: tuple[Weight, Weight],
        first: int = 0,
        again: Redispatch | None = None,
    ) -> Tensor:
        """Return the outputs [R, H] of the experts from ``first`` on, whose last rows plus one are ``ends`` [E].

        ``probs`` gives the probability [R] of each row as late as possible, None where all of them are 1.
        ``again`` sends the rows here once more.
        """
        x_RH, probs = weigh_input(self.config, x_RH, probs)
        h = grouped_product(x_RH, weights[0], ends, first)
        probs_R = probs()
        inputs = (h,) if probs_R is None else (h, probs_R.unsqueeze(-1))
        activate = partial(activation, self.config)
        if not self.activation_recompute:
            return grouped_product(activate(*inputs), weights[1], ends, first)
        checkpoint = tensor_parallel.CheckpointWithoutOutput()
        y_RH = grouped_product(checkpoint.checkpoint(activate, *inputs), weights[1], ends, first)
        checkpoint.discard_output_and_register_recompute(y_RH)
        return y_RH

    def before_backward(self, received: Tensor, again: Redispatch) -> Tensor:
        """Return ``received``, the outputs on their way back; a subclass may start backward with other work here."""
        return received


class GroupedExperts(ExpertProducts, MegatronModule):  # type: ignore[misc]
    """Experts with the parameters of Megatron's `GroupedMLP`, which ends with 0.16, and products of any type on any device."""

    def __init__(
        self, num_local_experts: int, config: Any, submodules: Any = None, name: str | None = None, **groups: Any
    ) -> None:
        """``submodules`` are those of single experts, which a spec keeps when they are exchanged for grouped ones."""
        super().__init__(config=config)
        (collection,) = groups.values()  # model_comm_pgs before Megatron 0.15, pg_collection since
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = collection.ep, collection.expt_tp, collection.expt_dp
        selective = config.recompute_granularity == "selective"
        self.activation_recompute = selective and "moe_act" in config.recompute_modules
        widths = num_local_experts * config.moe_ffn_hidden_size
        self.weight1 = self._parameter((config.hidden_size, widths * (1 + config.gated_linear_unit)), 1)
        self.weight2 = self._parameter((widths, config.hidden_size), 0)
        if config.perform_initialization:
            self._draw()
        self.register_load_state_dict_pre_hook(refuse_other_experts)
        self.register_load_state_dict_post_hook(_ignore_extra_states)

    def _parameter(self, shape: tuple[int, int], split: int) -> torch.nn.Parameter:
        """Create a parameter that is split over the expert-tensor-parallel ranks along dimension ``split``."""
        size = [*shape]
        size[split] //= self.tp_group.size()
        parameter = torch.nn.Parameter(torch.empty(size, dtype=self.config.params_dtype, device=self._device))
        parameter.allreduce = not self.config.expert_model_parallel_size > 1  # type: ignore[attr-defined]
        return parameter

    @property
    def _device(self) -> Any:
        return "cpu" if self.config.use_cpu_initialization else torch.cuda.current_device()

    def _draw(self) -> None:
        """Draw the weights as Megatron draws those of single experts: expert by expert, the first layer before the second."""
        config, hidden, width = self.config, self.config.hidden_size, self.config.moe_ffn_hidden_size
        gated = 1 + config.gated_linear_unit
        first_EHF = self.weight1.data.view(self.num_local_experts, hidden, -1)
        second_EFH = self.weight2.data.view(self.num_local_experts, -1, hidden)
        for first_HF, second_FH in zip(first_EHF, second_EFH, strict=True):
            first_HF.copy_(self._drawn((width * gated, hidden), 0, config.init_method, gated).t())
            second_FH.copy_(self._drawn((hidden, width), 1, config.output_layer_init_method).t())
        for parameter, split in ((self.weight1, 1), (self.weight2, 0)):
            layers.set_tensor_model_parallel_attributes(parameter, True, split, 1)

    def _drawn(self, shape: tuple[int, int], split: int, init: Callable[[Tensor], Any], stride: int = 1) -> Tensor:
        """Draw the weight [outputs, inputs] of a layer of one expert, of which this rank has a part along ``split``."""
        config, ranks = self.config, self.tp_group.size()
        size = [*shape]
        size[split] //= ranks
        weight = torch.empty(size, dtype=config.params_dtype, device=self._device)
        if config.use_cpu_initialization:
            types = {"params_dtype": config.params_dtype, "rank": self.tp_group.rank(), "world_size": ranks}
            layers._initialize_affine_weight_cpu(weight, *shape, size[split], split, init, stride, **types)
        else:
            layers._initialize_affine_weight_gpu(weight, init, partition_dim=split, stride=stride, is_expert=True)
        return weight

    def weights(self) -> tuple[Weight, Weight]:
        """Let both weights enter the graph here."""
        count, hidden, width = self.num_local_experts, self.config.hidden_size, self.weight2.shape[0] // self.num_local_experts
        first = deferred(self.weight1, count, hidden, self.weight_gradient)
        return first, deferred(self.weight2, count, width, self.weight_gradient)

    def weight_gradient(self, parameter: Tensor, operands: Operands) -> Tensor:
        """Compute the gradient of a weight; a subclass may add it to a buffer instead."""
        return weight_gradient(parameter, operands)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Map the parameters to those of single experts, as Megatron's own grouped experts do where it has them."""
        grouped: Any = getattr(megatron_experts, "GroupedMLP", None)
        if grouped is None:
            return sharded_experts(self, prefix, sharded_offsets, metadata)
        state: dict[str, Any] = grouped.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        return state

    def backward_dw(self) -> None:
        """Do nothing: backward has computed every weight gradient."""


Probabilities = Callable[[], Tensor | None]


def weigh_input(config: Any, x_RH: Tensor, probs: Probabilities) -> tuple[Tensor, Probabilities]:
    """Multiply rows by their probability where a configuration weighs inputs, and have activations weighed by 1 then."""
    if not config.moe_apply_probs_on_input or (probs_R := probs()) is None:
        return x_RH, probs
    return (x_RH * probs_R.unsqueeze(-1)).to(x_RH.dtype), lambda: None


def activation(config: Any, h: Tensor, probs_R1: Tensor | None = None) -> Tensor:
    """The activation [R, F] of ``h``, [R, 2F] where it is gated, times one weight per row if given: as Megatron's single
    experts compute it, not as its grouped ones, which compile it for every layer and every number of rows."""
    active: Tensor
    if config.gated_linear_unit and config.bias_activation_fusion and config.activation_func is silu:
        from megatron.core.fusions import fused_bias_swiglu

        if probs_R1 is None:
            active = fused_bias_swiglu.bias_swiglu_impl(h, None)
        else:
            active = fused_bias_swiglu.weighted_bias_swiglu_impl(h, None, probs_R1)
        return active.to(h.dtype)
    if config.gated_linear_unit:
        gate, up = h.chunk(2, dim=-1)
        active = config.activation_func(gate) * up
    else:
        active = config.activation_func(h)
    return active if probs_R1 is None else (active * probs_R1).to(h.dtype)


def with_expert_mixin(spec: Any, mixin: type) -> Any:
    """Copy a spec with every class of grouped experts exchanged for one that has ``mixin`` before it."""

    def exchanged(name: str, part: Any) -> Any:
        if isinstance(part, type) and issubclass(part, ExpertProducts):
            return type(part.__name__, (mixin, part), {"__module__": mixin.__module__})
        return part

    return with_parts(spec, exchanged)


class SeparateExperts(ExpertProducts, megatron_experts.TEGroupedMLP):  # type: ignore[misc]
    """Transformer Engine compatible experts with separate weight parameters.

    The products take a copy of the weights. Where weight gradients wait, and where the activation is a module, the layers give
    the answers.
    """

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs as `ExpertProducts.forward` does."""
        by_layers = self.linear_fc1.weight_gradients_wait or isinstance(self.activation_func, torch.nn.Module)
        if by_layers and not isinstance(tokens_per_expert, ExpertCall):
            answers: tuple[Tensor, Tensor | None] = megatron_experts.TEGroupedMLP.forward(
                self, permuted_local_hidden_states, tokens_per_expert, permuted_probs
            )
            return answers
        return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)

    def weights(self) -> tuple[Weight, Weight]:
        """Let copies of the weights of both layers enter the graph here."""
        return self._entered(self.linear_fc1), self._entered(self.linear_fc2)

    def _entered(self, layer: Any) -> Weight:
        weights_OI = [getattr(layer, f"weight{expert}") for expert in range(self.num_local_experts)]
        stacked_EIO = torch.stack([weight.t() for weight in weights_OI])
        gradient = partial(self.separate_gradient, weights_OI)
        experts, width = stacked_EIO.shape[:2]
        return deferred(stacked_EIO, experts, width, gradient)

    def separate_gradient(self, weights_OI: Sequence[Tensor], stacked_EIO: Tensor, operands: Operands) -> Tensor:
        """Compute the gradient of the copy; a subclass may add it to the buffers of the weights instead."""
        return weight_gradient(stacked_EIO, operands)


SeparateExperts.__name__ = megatron_experts.TEGroupedMLP.__name__  # by which checkpoints and bridges know the class


def _ignore_extra_states(module: torch.nn.Module, incompatible_keys: Any) -> None:
    """Accept the empty extra states that checkpoints of single experts have."""
    incompatible_keys.unexpected_keys[:] = [key for key in incompatible_keys.unexpected_keys if IGNORED_KEY not in key]
