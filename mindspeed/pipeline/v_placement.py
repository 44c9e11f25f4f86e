"""Wraps of Megatron's functions for a V: the first and the last stage are on rank 0, two stages on every rank.

Megatron asks for stages in two ways. With a chunk (``ignore_virtual=False``) it means the model, and gets the V. Without one it
means ranks, such as the one that reports losses, and its answer stays.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from mindspeed.pipeline.operations import PipelineShape
from mindspeed.plugins.patches import Function


def with_v_offset(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_transformer_layer_offset(config, vp_stage, pp_rank)``."""

    @functools.wraps(original)
    def offset(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
        if config.pipeline_model_parallel_size == 1 or vp_stage is None or config.pipeline_model_parallel_layout:
            own: int = original(config, vp_stage, *([] if pp_rank is None else [pp_rank]))
            return own
        shape = PipelineShape(config.pipeline_model_parallel_size, 2, 1, "v")
        rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        return shape.stage_of(rank, vp_stage) * (int(config.num_layers) // shape.stages)

    return offset


def with_v_last_stage(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``is_pipeline_last_stage(ignore_virtual, vp_stage)``: of the model's stages the last is chunk 1 of rank 0."""

    @functools.wraps(original)
    def is_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        if ignore_virtual or vp_stage is None or parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return bool(original(ignore_virtual, vp_stage))
        return vp_stage == 1 and parallel_state.is_pipeline_first_stage()

    return is_last_stage


def with_v_last_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``is_pp_last_stage(pp_group)``, which Megatron calls in addition to the chunk: the last stage is on the first
    rank."""

    @functools.wraps(original)
    def is_last_rank(pp_group: Any) -> bool:
        return bool(pp_group.rank() == 0)

    return is_last_rank


def with_whole_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_batch_on_this_tp_rank``, which gives the ranks of the first stage no labels.

    A rank with multi-token prediction gets the whole batch, as does one without a pipeline where that argument is missing.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_batch(*given: Any, **named: Any) -> Any:
        if "mtp_on_this_rank" in signature.parameters:
            call = signature.bind(*given, **named)
            call.arguments["mtp_on_this_rank"] = True
            return original(*call.args, **call.kwargs)
        from megatron.training import get_args

        arguments = get_args()
        stages = arguments.pipeline_model_parallel_size
        arguments.pipeline_model_parallel_size = 1
        try:
            return original(*given, **named)
        finally:
            arguments.pipeline_model_parallel_size = stages

    return get_batch


_first_chunk: list[weakref.ref[Any]] = []
"""The model chunk of the first stage, in the process that has it."""


def with_shared_weight_on_one_rank(original: Function) -> Function:
    """Wrap ``setup_embeddings_and_output_layer``: the second chunk of rank 0 copies the weight that it shares.

    As in Megatron, both copies are marked as shared, so that they get buckets alike, and the norm of gradients counts one.
    """

    @functools.wraps(original)
    def set_up(chunk: Any) -> None:
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            original(chunk)
            return
        if chunk.pre_process:
            chunk.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
        if chunk.post_process and chunk.output_layer.weight is not None:
            chunk.output_layer.weight.is_embedding_or_output_parameter = True
        weight = _shared_weight(chunk)
        if weight is None:
            return
        weight.shared_embedding = True
        if chunk.pre_process:
            _first_chunk[:] = [weakref.ref(chunk)]
            return
        weight.shared = True
        (first,) = _first_chunk
        weight.data.copy_(_shared_weight(first()).data)

    return set_up


def with_gradients_of_one_rank(original: Function) -> Function:
    """Wrap ``_allreduce_word_embedding_grads``: both copies on rank 0 get the sum of their gradients."""

    @functools.wraps(original)
    def sum_gradients(model: Any, config: Any, *groups: Any, **named: Any) -> None:
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            original(model, config, *groups, **named)
            return
        chunks = [get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in model]
        weights = [weight for chunk in chunks if (weight := _shared_weight(chunk)) is not None]
        gradients = [getattr(weight, "main_grad", weight.grad) for weight in weights]
        if len(gradients) < 2 or any(gradient is None for gradient in gradients):
            return  # no weight is shared on this rank, or it is frozen
        first, second = gradients
        first.add_(second)
        second.copy_(first)

    return sum_gradients


def _shared_weight(chunk: Any) -> Any:
    """Return the weight that a chunk shares with another one: of an embedding or of an output layer; None without one."""
    shares = chunk.share_embeddings_and_output_weights
    if chunk.pre_process:
        return chunk.embedding.word_embeddings.weight if shares or chunk.config.mtp_num_layers else None
    if getattr(chunk, "mtp_process", False) or (chunk.post_process and shares):
        return chunk.shared_embedding_or_output_weight()
    return None


class LayoutOfV:
    """Stands before ``PipelineParallelLayerLayout``: the second chunk of rank r is stage 2 pp - 1 - r."""

    layout: list[list[list[Any]]]
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self.virtual_pipeline_model_parallel_size == 2:
            second = [rank[1] for rank in self.layout]
            self.layout = [[rank[0], stage] for rank, stage in zip(self.layout, reversed(second), strict=True)]

    def validate_layer_layout(self, *given: Any, **named: Any) -> bool:
        """Check the layout, and return that the last stage has multi-token prediction if any, for other layouts are refused.

        Megatron looks for it on the last rank, and exchanges shapes of tensors if it is on another one.
        """
        super().validate_layer_layout(*given, **named)  # type: ignore[misc]
        return False

    @classmethod
    def from_str(cls, layout: str, pipeline_model_parallel_size: int) -> LayoutOfV:
        """Read a layout, which Megatron keeps for other plans in this process."""
        return cls(layout, pipeline_model_parallel_size)

    def get_layer_offset(self: Any, layer_type: Any = None, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
        """Return the number of layers of a type in the stages before a chunk."""
        if layer_type is None or vp_stage is None or self.virtual_pipeline_model_parallel_size != 2:
            given = {"layer_type": layer_type, "vp_stage": vp_stage, "pp_rank": pp_rank}
            own: int = super().get_layer_offset(**{name: value for name, value in given.items() if value is not None})  # type: ignore[misc]
            return own
        shape = PipelineShape(self.pipeline_model_parallel_size, 2, 1, "v")
        rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        before = range(shape.stage_of(rank, vp_stage))
        return sum(self.layout[shape.rank_of(stage)][stage >= shape.pp].count(layer_type) for stage in before)
