"""Wraps of Megatron's functions for a V: the first and the last stage are on rank 0, two stages on every rank.

Megatron asks for stages in two ways. With a chunk (``ignore_virtual=False``) it means the model, and gets the V. Without one it
means ranks, such as the one that reports losses, and its answer stays.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state

from mindspeed import plugins as ms
from mindspeed.pipeline.operations import PipelineShape
from mindspeed.pipeline.v_conditions import TIED, UNTIE


def with_v_offset(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_transformer_layer_offset(config, vp_stage, pp_rank)``."""

    @functools.wraps(original)
    def offset(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
        if config.pipeline_model_parallel_size == 1 or vp_stage is None:
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


def with_untied_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GPTModel.__init__``: raise MS304 on every rank for tied embeddings, of which a plan need not know.

    Megatron reduces the tied weight over the first and the last rank, and in a V the last one holds neither of its uses.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*given: Any, **named: Any) -> None:
        tied = signature.bind(*given, **named).arguments.get("share_embeddings_and_output_weights")
        if tied and parallel_state.get_pipeline_model_parallel_world_size() > 1:
            raise ms.MindSpeedError([ms.Problem("MS304", TIED, fix=UNTIE)])
        original(*given, **named)

    return initialize
