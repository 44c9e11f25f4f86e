"""The experts of a rank as one module of Megatron: two parameters, grouped products, checkpoints of single experts.

R rows of tokens, sorted by expert; E experts of this rank, H hidden size, F size of an expert's activation.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor
from torch.nn.functional import silu

from mindspeed.megatron.module_specs import with_parts
from mindspeed.moe.overlap import ExpertCall, Redispatch
from mindspeed.moe.products import (
    Operands,
    Weight,
    deferred,
    deferred_separate,
    grouped_product,
    separate_gradient,
    weight_gradient,
)
from mindspeed.plugins import MindSpeedError, Problem
from mindspeed.problems import advice

IGNORED_KEY: Final = "_extra_state"
"""Keys of the empty states that single linear layers add to checkpoints."""


def sharded_experts(module: Any, prefix: str, offsets: tuple[Any, ...], metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Map both parameters of a module of grouped experts, and one empty extra state per expert and layer."""
    single = (metadata or {}).get("singleton_local_shards", False)
    first = module.ep_group.rank() * module.num_local_experts
    total = module.ep_group.size() * module.num_local_experts
    state: dict[str, Any] = {}
    for name, layer in (("weight1", "linear_fc1"), ("weight2", "linear_fc2")):
        build = partial(_build, module, offsets, layer == "linear_fc1", single)
        merge = partial(_merge, getattr(module, name).shape, module.num_local_experts)
        key, replica = f"{prefix}experts.{layer}.weight", (0, 0, module.dp_group.rank())
        state[f"{prefix}{name}"] = ShardedTensorFactory(key, getattr(module, name), build, merge, replica)
        for expert in range(first, first + module.num_local_experts):
            where = offsets if single else (*offsets, (len(offsets), expert, total))
            place = f"experts.{expert}" if single else "experts"
            state[f"{prefix}expert{expert}.{layer}.{IGNORED_KEY}"] = make_sharded_object_for_checkpoint(
                None, f"{prefix}{place}.{layer}.{IGNORED_KEY}", where, (0, module.tp_group.rank(), module.dp_group.rank())
            )
    return state


def refuse_other_experts(module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Raise MindSpeedError with MS642 for a state of single experts, or with weights of other shapes, before it is loaded."""
    shapes = {name: (tuple(weight.shape), state.get(f"{prefix}{name}")) for name, weight in module.named_parameters()}
    other = {name: (own, tuple(given.shape)) for name, (own, given) in shapes.items() if given is not None}
    found = [f"{name} is {own}, but {given} in the loaded state" for name, (own, given) in other.items() if own != given]
    fix = (
        "load the state into a model with the same number and size of experts on the same number of ranks, or use a "
        "distributed checkpoint"
    )
    if any(key.startswith(f"{prefix}local_experts.") for key in state):
        found = ["the layer has one tensor for all local experts, but the loaded state has one tensor for each expert"]
        fix = "save the state with --ckpt-format torch_dist, which both kinds of layers can load, or remove --moe-grouped-gemm"
    if found:
        text = f"the experts of the loaded state do not fit {prefix.removesuffix('.') or 'the layer'}: {', '.join(found)}"
        raise MindSpeedError([Problem("MS642", text, fix=advice(fix))])


@torch.no_grad()
def _build(
    module: Any,
    offsets: tuple[Any, ...],
    is_first: bool,
    single: bool,
    key: str,
    tensor: Tensor,
    replica_id: Any,
    flattened_range: slice | None,
) -> list[Any]:
    """The shards of a parameter, or of a tensor of its optimizer: of each matrix [out, in], gate and value apart.

    With ``single`` every expert has shards of its own, else all experts of the rank are one with the expert in front. Raises
    MindSpeedError with MS641 for a range of a flattened tensor, which only Megatron before 0.16 stores, by its own code.
    """
    if flattened_range is not None:
        text = (
            f"the optimizer state of {key} would be saved as a range of a flattened tensor, a format that Megatron no "
            "longer reads"
        )
        fix = (
            "in the metadata for sharded_state_dict, set distrib_optim_sharding_type to dp_reshardable or fully_reshardable "
            "instead of fully_sharded_model_space"
        )
        raise MindSpeedError([Problem("MS641", text, fix=advice(fix))])
    axis, tp_rank, tp_size = len(offsets), module.tp_group.rank(), module.tp_group.size()
    inner = module.config.hidden_size if is_first else -1
    outer = -1 if is_first else module.config.hidden_size
    matrices = tensor.view(module.num_local_experts, inner, outer).transpose(1, 2)
    halves = matrices.chunk(2, 1) if is_first and module.config.gated_linear_unit else (matrices,)
    shards = []
    for number, half in enumerate(halves):
        if single:
            first = module.ep_group.rank() * module.num_local_experts
            suffix = f"_{'wv'[number]}" if len(halves) == 2 else ""
            split = (axis + (not is_first), tp_rank, tp_size)
            before, _, layer = key.rpartition("experts.")
            named = [(f"{before}experts.{first + n}.{layer}{suffix}", matrix) for n, matrix in enumerate(half)]
            shards += [_shard(name, matrix, offsets, (split,), axis, replica_id) for name, matrix in named]
        else:
            experts = (axis, module.ep_group.rank(), module.ep_group.size())
            split = (axis + 1 + (not is_first), number * tp_size + tp_rank, len(halves) * tp_size)
            shards.append(_shard(key, half, offsets, (experts, split), axis, replica_id))
    return shards


def _shard(key: str, tensor: Tensor, offsets: Any, splits: Any, prepended: int, replica_id: Any) -> Any:
    return ShardedTensor.from_rank_offsets(
        key, tensor.contiguous(), *offsets, *splits, replica_id=replica_id, prepend_axis_num=prepended
    )


@torch.no_grad()
def _merge(shape: torch.Size, experts: int, shards: list[Tensor]) -> Tensor:
    """Join the shards of `_build` to the parameter: halves side by side, matrices [in, out]."""
    if shards[0].dim() == 2:
        shards = [torch.stack(shards[start : start + experts]) for start in range(0, len(shards), experts)]
    return torch.cat(shards, -2).transpose(-1, -2).reshape(shape)


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

    Where weight gradients wait, and where the activation is a module, the layers give the answers.
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
        """Let the weights of both layers enter the graph here."""
        return self._entered(self.linear_fc1), self._entered(self.linear_fc2)

    def _entered(self, layer: Any) -> Weight:
        weights_OI = [getattr(layer, f"weight{expert}") for expert in range(self.num_local_experts)]
        return deferred_separate(weights_OI, partial(self.separate_gradient, weights_OI), self.needs_counts(weights_OI))

    def needs_counts(self, weights_OI: Sequence[Tensor]) -> bool:
        """Return whether `separate_gradient` needs the rows of each expert on the host."""
        return False

    def separate_gradient(self, weights_OI: Sequence[Tensor], operands: Operands) -> Tensor:
        """Compute the gradients [E, O, I] of weights; a subclass may add them to buffers instead."""
        return separate_gradient(operands)


SeparateExperts.__name__ = megatron_experts.TEGroupedMLP.__name__  # by which checkpoints and bridges know the class


def _ignore_extra_states(module: torch.nn.Module, incompatible_keys: Any) -> None:
    """Accept the empty extra states that checkpoints of single experts have."""
    incompatible_keys.unexpected_keys[:] = [key for key in incompatible_keys.unexpected_keys if IGNORED_KEY not in key]
