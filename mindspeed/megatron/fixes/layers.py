"""Fixes of layers and functions that assume Transformer Engine, its version, a compiler or a device."""

from __future__ import annotations

from copy import copy
from inspect import signature
from typing import Any, Final

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.utils import get_te_version

from mindspeed.engine.runtime import session
from mindspeed.plugins.patches import Function, wrapper
from mindspeed.problems import Fix, PlatformError, Problem

HAVE_ENGINE: Final = str(get_te_version() or "0.0.0") != "0.0.0"
"""True if Transformer Engine is there; without it its version is None, since Megatron 0.17 0.0.0."""


@wrapper
def false_without_engine(is_te_min_version: Function, version: str, check_equality: bool = True) -> bool:
    """``is_te_min_version``: no version satisfies a minimum where Transformer Engine is not installed."""
    return HAVE_ENGINE and is_te_min_version(version, check_equality)


@wrapper
def only_with_engine(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``get_gpt_layer_with_transformer_engine_spec``, which would fail by a name that is not defined.

    Raises PlatformError with MS339 where neither Transformer Engine is installed nor its layers are provided.
    """
    from megatron.core.models.gpt import gpt_layer_specs

    if not gpt_layer_specs.HAVE_TE:
        text = (
            "the program builds layers of Transformer Engine, which is not installed, and no feature provides compatible ones"
        )
        raise PlatformError([Problem("MS339", text, fix=Fix.give_field("transformer_engine_layers", True))])
    return original(*args, **kwargs)


@wrapper
def norms_of_megatron(initialize: Function, *args: Any, **kwargs: Any) -> None:
    """``CLIPViTModel.__init__``: torch's LayerNorm is built from a configuration, as the norms of other models are."""
    bound = signature(initialize).bind(*args, **kwargs)
    bound.apply_defaults()
    for name in ("ln_pre_impl", "ln_post_impl"):
        if bound.arguments[name] is torch.nn.LayerNorm:
            bound.arguments[name] = WrappedTorchNorm
    initialize(*bound.args, **bound.kwargs)


def uncompiled(function: Function) -> Function:
    """The function that was given to torch.compile, or the function itself where Megatron did not compile it."""
    original: Function = getattr(function, "_torchdynamo_orig_callable", function)
    return original


@wrapper
def allow_sequence_parallel(new: Function, cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
    """``WrappedTorchNorm.__new__``: each rank norms its share of the sequence, and the parameters' gradients are
    summed over the tensor-parallel group because they are marked ``sequence_parallel``."""
    if not config.sequence_parallel:
        return new(cls, config, *args, **kwargs)
    accepted = copy(config)
    accepted.sequence_parallel = False
    norm = new(cls, accepted, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm


@wrapper
def take_widths(init: Function, core: Any, *args: Any, **kwargs: Any) -> None:
    """``DotProductAttention.__init__`` with the widths that multi-latent attention gives and only Transformer Engine's takes:
    ``k_channels`` of a query and a key, which nothing in it needs to know, and ``v_channels`` of a value and the result."""
    kwargs.pop("k_channels", None)
    v_channels = kwargs.pop("v_channels", None)
    init(core, *args, **kwargs)
    if v_channels is not None:
        core.hidden_size_per_partition = core.num_attention_heads_per_partition * v_channels


@wrapper
def mark_sinks_of_a_rank(init: Function, core: Any, *args: Any, **kwargs: Any) -> None:
    """``DotProductAttention.__init__`` that marks its learnable sinks as those of one rank's heads."""
    init(core, *args, **kwargs)
    sinks = getattr(core, "softmax_offset", None)
    if sinks is not None and sinks.requires_grad:
        sinks.tensor_model_parallel = True


@wrapper
def made_on_host(init: Function, embedding: Any, *args: Any, **kwargs: Any) -> None:
    """``YarnRotaryEmbedding.__init__`` with the frequencies made on the host."""
    bound = signature(init).bind(embedding, *args, **kwargs)
    bound.arguments["use_cpu_initialization"] = True
    init(*bound.args, **bound.kwargs)


@wrapper
def near_its_gpu(original: Function) -> None:
    """Wrap ``set_ideal_affinity_for_current_gpu``, which asks NVIDIA's driver for the cores near a GPU."""
    active = session.current()
    if active is None or active.plan.environment.get("platform") == "cuda":
        original()


@wrapper
def is_no_mock(original: Function, module: Any) -> bool:
    """Wrap ``is_inference_column_parallel_linear(module)``: without Transformer Engine its classes are mocks, no types."""
    from megatron.core.tensor_parallel import inference_layers

    return isinstance(inference_layers.InferenceColumnParallelLinear, type) and bool(original(module))
