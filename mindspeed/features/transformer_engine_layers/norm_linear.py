"""The role of a norm and a column-parallel linear layer in one module."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from mindspeed.features.transformer_engine_layers.interface import refuse
from mindspeed.features.transformer_engine_layers.linear import ColumnRole, LinearResult
from mindspeed.features.transformer_engine_layers.modules import LayerNormLinear, norm_options, norm_parameter, normalize


class TELayerNormColumnParallelLinear(ColumnRole, LayerNormLinear, ColumnParallelLinear):  # type: ignore[misc]
    """A norm, and Megatron's column-parallel layer on its output."""

    def __init__(self, input_size: int, output_size: int, **given: Any) -> None:
        config = given["config"]
        if given.get("is_expert"):
            refuse("TELayerNormColumnParallelLinear", "does not support experts", "use TEColumnParallelLinear")
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            text = f"does not support normalization {config.normalization}"
            refuse("TELayerNormColumnParallelLinear", text, "use LayerNorm or RMSNorm")
        self.build_column("TELayerNormColumnParallelLinear", input_size, output_size, **given)
        self.normalization, self.eps = config.normalization, config.layernorm_epsilon
        self.zero_centered_gamma = bool(config.layernorm_zero_centered_gamma)
        self.return_layernorm_output = self.return_layernorm_output_gathered = False
        linear = dict(self._parameters)
        self._parameters.clear()
        options = norm_options(config)
        self.layer_norm_weight = norm_parameter(input_size, 0.0 if self.zero_centered_gamma else 1.0, **options)
        if self.normalization == "LayerNorm":
            self.layer_norm_bias = norm_parameter(input_size, 0.0, **options)
        else:
            self.register_parameter("layer_norm_bias", None)
        self._parameters.update(linear)  # the norm's come first, as in Transformer Engine

    def normalized(self, x: Tensor) -> Tensor:
        """Return the norm of ``x``, which the weight multiplies."""
        return normalize(x, self.layer_norm_weight, self.layer_norm_bias, self)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> LinearResult:
        """Multiply the norm of ``x`` by this rank's rows of the weight.

        With ``return_layernorm_output`` the norm is returned too, as Transformer Engine returns it: in a tuple with the
        output, or as the third value where the bias is returned.
        """
        normalized = self.normalized(x)
        output, bias = ColumnParallelLinear.forward(self, normalized, *args, **kwargs)
        if not self.return_layernorm_output:
            return output, bias
        if self.return_layernorm_output_gathered and self.sequence_parallel:
            normalized = gather_from_sequence_parallel_region(normalized, group=self.tp_group)
        return (output, bias, normalized) if self.te_return_bias else ((output, normalized), None)  # type: ignore[return-value]

    def reset_layer_norm_parameters(self) -> None:
        """Set the parameters of the norm to those of one that only normalizes."""
        self.layer_norm_weight.data.fill_(0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            self.layer_norm_bias.data.zero_()
