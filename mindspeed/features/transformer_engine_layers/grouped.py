"""The roles of the linear layers of several experts: one module with a weight for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from mindspeed.features.transformer_engine_layers.delayed import DelayedWeightGradients, ProductQueue
from mindspeed.features.transformer_engine_layers.interface import refuse, refuse_options, refuse_unknown
from mindspeed.features.transformer_engine_layers.modules import GroupedLinear
from mindspeed.features.transformer_engine_layers.sharding import sharded_parameters


class TEGroupedLinear(DelayedWeightGradients, GroupedLinear):
    """Linear layers of the experts of a rank, ``weight0`` to ``weightN``."""

    config: Any
    split: int | None = None
    """The dimension of a weight that expert-tensor-parallel ranks split: 0 for column, 1 for row."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None = None,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        pg_collection: Any = None,
        tp_group: Any = None,  # the groups before Megatron 0.16
        name: str | None = None,
        **newer: Any,
    ) -> None:
        role = type(self).__name__
        refuse_unknown(role, newer)
        refuse_options(role, config)
        if not is_expert:
            refuse(role, "is a layer of experts, but is_expert is False", "use TEColumnParallelLinear")
        torch.nn.Module.__init__(self)
        self.config, self.num_gemms, self.ub_name = config, num_gemms, tp_comm_buffer_name
        self._groups = _ExpertGroups(pg_collection, tp_group)
        self._tp_group = self._groups.tp
        self.expert_parallel = config.expert_model_parallel_size > 1
        ranks = layers.get_pg_size(self._tp_group)
        self.explicit_expert_comm = ranks > 1 or self.expert_parallel
        shape = [output_size, input_size]
        self.split = {"column": 0, "row": 1}.get(parallel_mode or "")
        if self.split is not None:
            shape[self.split] = layers.divide(shape[self.split], ranks)
        self.out_features, self.in_features = shape
        self.parallel_mode = None if self.explicit_expert_comm else parallel_mode
        self.tp_size = 1 if self.explicit_expert_comm else ranks
        self.use_bias, self.te_return_bias = bias, skip_bias_add and bias
        self.is_first_microbatch = self.save_original_input = True
        self.te_quant_params = None
        self._make_parameters(init_method, (output_size, input_size))
        self.register_load_state_dict_pre_hook(_merge_extra_states)  # type: ignore[no-untyped-call]
        self.delay_weight_gradients(config)

    def _make_parameters(self, init_method: Callable[[Tensor], Any], whole: tuple[int, int]) -> None:
        config, on_cpu = self.config, self.config.use_cpu_initialization
        kind = {"dtype": config.params_dtype, "device": "cpu" if on_cpu else torch.cuda.current_device()}
        for expert in range(self.num_gemms):
            weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **kind))
            if config.perform_initialization and on_cpu:
                axis = self.split or 0
                ranks = {"rank": layers.get_pg_rank(self._tp_group), "world_size": layers.get_pg_size(self._tp_group)}
                types = {"params_dtype": config.params_dtype, **ranks}
                layers._initialize_affine_weight_cpu(weight, *whole, weight.shape[axis], axis, init_method, **types)
            elif config.perform_initialization:
                initialize = layers._initialize_affine_weight_gpu if get_cuda_rng_tracker().is_initialized() else _initialize
                initialize(weight, init_method, partition_dim=self.split or 0, is_expert=True)
            self.register_parameter(f"weight{expert}", weight)
        for expert in range(self.num_gemms if self.use_bias else 0):
            self.register_parameter(f"bias{expert}", torch.nn.Parameter(torch.zeros(self.out_features, **kind)))
        for parameter in self.parameters():
            parameter.allreduce = not self.expert_parallel  # type: ignore[attr-defined]

    def finish_init(self, quantization_config: Any) -> None:
        """Refuse a quantization of single layers, which nothing here has."""
        if quantization_config is not None:
            refuse(type(self).__name__, "does not support quantization", "remove the quantization of layers")

    def will_execute_quantized(self, is_context_quantized: bool) -> bool:
        """Return whether products are quantized: those of a quantized context are."""
        return is_context_quantized

    def forward(self, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[Tensor] | None]:
        """Multiply the rows of each expert, ``m_splits`` of them, by its weight; biases are added or returned."""
        weights = [getattr(self, f"weight{expert}") for expert in range(self.num_gemms)]
        biases = [getattr(self, f"bias{expert}") for expert in range(self.num_gemms)] if self.use_bias else None
        counts = [int(count) for count in m_splits]
        rows = torch.split(x, counts)
        output = torch.cat([self._of_one_expert(part, weight) for part, weight in zip(rows, weights, strict=True)])
        if biases is None or self.te_return_bias:
            return output, biases
        added = torch.stack(biases).repeat_interleave(torch.tensor(counts, device=x.device), dim=0)
        return output + added, None

    def _of_one_expert(self, x: Tensor, weight: Tensor) -> Tensor:
        fusion = self.config.gradient_accumulation_fusion
        return self.product(x, weight, None, fusion, False, False, tp_group=self._tp_group)

    def _run_waiting(self, waiting: ProductQueue) -> None:
        for _ in range(self.num_gemms):  # one backward pass leaves a product of each expert
            waiting.run_first()

    def _sharded_experts(
        self, axes: dict[str, int], prefix: str, offsets: tuple[Any, ...], metadata: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return the state with the keys of single experts, each of which is a part of one global tensor."""
        single = bool((metadata or {}).get("singleton_local_shards", False))
        state: dict[str, Any] = {}
        own = self.state_dict(prefix="", keep_vars=True)
        total = layers.get_pg_size(self._groups.ep) * self.num_gemms
        first = layers.get_pg_rank(self._groups.ep) * self.num_gemms
        names = ["weight", "bias"] if self.use_bias else ["weight"]
        for expert in range(self.num_gemms):
            entries = {f"{expert}.{name}": own[f"{name}{expert}"] for name in names}
            entries[f"{expert}._extra_state"] = own["_extra_state"]
            its_axes = {f"{expert}.{name}": axis for name, axis in axes.items()}
            its_offsets = offsets if single else (*offsets, (len(offsets), first + expert, total))
            sub = sharded_parameters(self, its_axes, "", its_offsets, metadata, entries)
            replace_prefix_for_sharding(sub, f"{expert}.", f"{first + expert}.{prefix}" if single else prefix)
            state |= {f"{prefix}{name}{expert}": sub[f"{expert}.{name}"] for name in names}
            state[f"{prefix}_extra_state{expert or ''}"] = sub[f"{expert}._extra_state"]
        for tensor in state.values():
            pipeline, split, _ = tensor.replica_id
            whole = getattr(tensor, "is_data_parallel_fully_shard", False)
            tensor.replica_id = (pipeline, split, 0 if whole else layers.get_pg_rank(self._groups.dp))
        return state

    def extra_repr(self) -> str:
        return f"{self.num_gemms} x (in_features={self.in_features}, out_features={self.out_features}), bias={self.use_bias}"


class TEColumnParallelGroupedLinear(TEGroupedLinear):
    """Layers whose weights are split by rows."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, **given: Any) -> None:
        super().__init__(num_gemms, input_size, output_size, parallel_mode="column", **given)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the state; weights and biases are split along dimension 0."""
        return self._sharded_experts({"weight": 0, "bias": 0}, prefix, sharded_offsets, metadata)


class TERowParallelGroupedLinear(TEGroupedLinear):
    """Layers whose weights are split by columns."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, **given: Any) -> None:
        super().__init__(num_gemms, input_size, output_size, parallel_mode="row", **given)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the state; weights are split along dimension 1, and every rank has the biases."""
        return self._sharded_experts({"weight": 1}, prefix, sharded_offsets, metadata)


def _initialize(weight: Tensor, init_method: Callable[[Tensor], Any], partition_dim: int, is_expert: bool) -> None:
    """Initialize a weight in a process that has no random states for parallel layers, as Transformer Engine does."""
    layers.set_tensor_model_parallel_attributes(weight, True, partition_dim, 1)
    init_method(weight)


class _ExpertGroups:
    """The groups of experts: tensor-parallel, expert-parallel and data-parallel."""

    def __init__(self, collection: Any, tp_group: Any) -> None:
        self.tp = tp_group or getattr(collection, "expt_tp", None) or parallel_state.get_expert_tensor_parallel_group()
        self.ep = getattr(collection, "ep", None) or parallel_state.get_expert_model_parallel_group()
        self.dp = getattr(collection, "expt_dp", None) or parallel_state.get_expert_data_parallel_group()


def _merge_extra_states(module: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Remove the extra states of single experts, which distributed checkpoints have, and accept that there is none."""
    for expert in range(1, module.num_gemms):
        state_dict.pop(f"{prefix}_extra_state{expert}", None)
    state_dict.setdefault(f"{prefix}_extra_state", None)
