"""The roles of linear layers: column-parallel, row-parallel and duplicated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from torch import Tensor

from mindspeed.features.transformer_engine_layers.delayed import DelayedWeightGradients
from mindspeed.features.transformer_engine_layers.interface import refuse, refuse_options, refuse_unknown
from mindspeed.features.transformer_engine_layers.modules import Linear, accept_missing_extra_state
from mindspeed.features.transformer_engine_layers.sharding import sharded_parameters

LinearResult = tuple[Any, Tensor | None]
"""The output of a linear layer, and its bias where the caller adds it."""


class LinearRole(DelayedWeightGradients):
    """Mixin of the linear roles: the attributes by which Transformer Engine's layers are read."""

    config: Any
    bias: Any
    skip_bias_add: bool
    tp_group: Any

    def describe(
        self, config: Any, mode: str | None, bias: bool, buffer: str | None, sizes: tuple[int, int], ranks: int
    ) -> None:
        """Set the attributes; ``sizes`` are those of this rank's input and output, ``mode`` and ``ranks`` of its split."""
        self.config = config
        self.in_features, self.out_features = sizes
        self.tp_size, self.ub_name = ranks, buffer
        self.parallel_mode = mode
        self.use_bias, self.te_return_bias = bias, self.skip_bias_add and bias
        self.return_bias, self.fuse_wgrad_accumulation = self.te_return_bias, config.gradient_accumulation_fusion
        self.is_first_microbatch = True
        self.disable_parameter_transpose_cache = getattr(config, "disable_parameter_transpose_cache", False)
        self.save_original_input = True
        self.te_quant_params = None
        self._tp_group = self.tp_group
        self.delay_weight_gradients(config)

    @property
    def parallel_mode(self) -> str | None:
        """The split of the weight whose collectives the layer runs itself: column, row, or None where other code does."""
        return self._parallel_mode

    @parallel_mode.setter
    def parallel_mode(self, mode: str | None) -> None:
        self._parallel_mode = mode
        self.explicit_expert_comm = mode is None  # the name by which Megatron's local layers leave collectives to others

    def finish_init(self, quantization_config: Any) -> None:
        """Refuse a quantization of single layers, which nothing here has."""
        if quantization_config is not None:
            refuse(type(self).__name__, "does not support quantization", "remove the quantization of layers")

    def will_execute_quantized(self, is_context_quantized: bool) -> bool:
        """Return whether products are quantized: those of a quantized context are."""
        return is_context_quantized

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, TP={self.tp_size}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


class TELinear(LinearRole, Linear):
    """A linear layer; by itself the one whose weight every tensor-parallel rank has."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        is_expert: bool = False,
        symmetric_ar_type: str | None = None,
        tp_group: Any = None,
        name: str | None = None,
        pg_collection: Any = None,
        **newer: Any,
    ) -> None:
        refuse_unknown("TELinear", newer | {"symmetric_ar_type": symmetric_ar_type})
        if parallel_mode != "duplicated":
            refuse(
                "TELinear",
                f"does not support parallel_mode {parallel_mode!r}",
                "use TEColumnParallelLinear or TERowParallelLinear",
            )
        refuse_layer(type(self).__name__, config, skip_weight_param_allocation=skip_weight_param_allocation)
        torch.nn.Module.__init__(self)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        kind = {"dtype": config.params_dtype, "device": device}
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, **kind))
        self.register_parameter("bias", torch.nn.Parameter(torch.zeros(output_size, **kind)) if bias else None)
        if config.perform_initialization:
            tracker = get_cuda_rng_tracker()
            names = tracker.get_states() if tracker.is_initialized() else {}
            name_of_state = get_data_parallel_rng_tracker_name()
            with tracker.fork(name_of_state) if name_of_state in names else nullcontext():
                init_method(self.weight)
        for parameter in self.parameters():
            parameter.allreduce = True  # type: ignore[attr-defined]
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.tp_group = layers.get_tensor_model_parallel_group_if_none(tp_group, is_expert=is_expert)
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        self.skip_bias_add = skip_bias_add
        accept_missing_extra_state(self)
        self.describe(config, None, bias, tp_comm_buffer_name, (input_size, output_size), 1)

    def forward(self, x: Tensor) -> LinearResult:
        """Multiply ``x`` [..., input size] by the weight; each rank has the whole of both."""
        bias = None if self.te_return_bias else self.bias
        output = self.product(x, self.weight, bias, self.gradient_accumulation_fusion, False, False, tp_group=self.tp_group)
        return output, self.bias if self.te_return_bias else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the parameters, of which every tensor-parallel rank has a replica."""
        return sharded_parameters(self, {}, prefix, sharded_offsets, metadata)


class ColumnRole(LinearRole):
    """Mixin of the roles that are Megatron's column-parallel layer."""

    stands_for = ColumnParallelLinear
    output_size_per_partition: int
    sequence_parallel: bool

    def build_column(self, role: str, input_size: int, output_size: int, **given: Any) -> None:
        """Make Megatron's layer from the keywords of Megatron's wrapper, which takes some only to refuse them."""
        config, bias, buffer = given["config"], given["bias"], given.pop("tp_comm_buffer_name", None)
        known = {name: given.pop(name) for name in _COLUMN if name in given}
        refused = {name: given.pop(name, False) for name in ("gather_output", "skip_weight_param_allocation")}
        refuse_unknown(role, {option: value for option, value in given.items() if option not in _UNUSED})
        refuse_layer(role, config, **refused)
        ColumnParallelLinear.__init__(self, input_size, output_size, gather_output=False, tp_comm_buffer_name=buffer, **known)
        self.stride = known.get("stride", 1)
        mode = None if self.explicit_expert_comm else "column"
        ranks = 1 if mode is None else layers.get_pg_size(self.tp_group)
        self.describe(config, mode, bias, buffer, (input_size, self.output_size_per_partition), ranks)

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.product(input, weight, *args, **kwargs)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the parameters, the linear ones split over tensor-parallel ranks by rows."""
        return sharded_parameters(self, {"weight": 0, "bias": 0}, prefix, sharded_offsets, metadata)


_COLUMN = ("config", "init_method", "bias", "skip_bias_add", "is_expert", "tp_group", "stride")
"""Keywords of Megatron's wrapper that its local layer takes as they are."""
_UNUSED = ("name", "pg_collection")
"""Keywords that nothing here needs: the groups of a collection that ``tp_group`` is not are those of weight shards."""


class TEColumnParallelLinear(ColumnRole, TELinear, ColumnParallelLinear):  # type: ignore[misc]  # megatron has no types
    """Megatron's column-parallel layer in the role of Transformer Engine's."""

    def __init__(self, input_size: int, output_size: int, **given: Any) -> None:
        self.build_column("TEColumnParallelLinear", input_size, output_size, **given)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> LinearResult:
        """Multiply ``x`` by this rank's rows of the weight; a part of a tensor is copied before ranks gather it."""
        x = x.contiguous() if self.sequence_parallel else x
        result: LinearResult = ColumnParallelLinear.forward(self, x, *args, **kwargs)
        return result


class TERowParallelLinear(TELinear, RowParallelLinear):  # type: ignore[misc]
    """Megatron's row-parallel layer in the role of Transformer Engine's."""

    stands_for = RowParallelLinear
    input_size_per_partition: int

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
        name: str | None = None,
        pg_collection: Any = None,
        **newer: Any,
    ) -> None:
        refuse_unknown("TERowParallelLinear", newer)
        refuse_layer("TERowParallelLinear", config, **{"input_is_parallel=False": not input_is_parallel})
        RowParallelLinear.__init__(
            self,
            input_size,
            output_size,
            config=config,
            init_method=init_method,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_comm_buffer_name=tp_comm_buffer_name,
            tp_group=tp_group,
        )
        ranks = layers.get_pg_size(self.tp_group)
        mode = None if self.explicit_expert_comm else "row"
        sizes = (self.input_size_per_partition, output_size)
        self.describe(config, mode, bias, tp_comm_buffer_name, sizes, 1 if mode is None else ranks)

    def forward(self, x: Tensor) -> LinearResult:
        """Multiply ``x`` by this rank's columns of the weight and sum over ranks."""
        result: LinearResult = RowParallelLinear.forward(self, x)
        return result

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.product(input, weight, *args, **kwargs)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the parameters, the weight split over tensor-parallel ranks by columns."""
        return sharded_parameters(self, {"weight": 1}, prefix, sharded_offsets, metadata)


def refuse_layer(role: str, config: Any, **options: bool) -> None:
    """Raise MS338 for an option that Transformer Engine's layers do not have either, or that only they have."""
    refuse_options(role, config)
    for option, given in options.items():
        if given:
            refuse(role, f"does not support {option}", "use Megatron's local layer")
