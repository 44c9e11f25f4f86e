"""A GPTModel or HybridModel by the values of a job, in chunks that are ready to train: for loops of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed.job.world import World


def build_chunks(
    config: TransformerConfig, world: World, specs: Callable[[int | None], tuple[Any, Any]], **options: Any
) -> list[GPTModel]:
    """This rank's model chunks. ``specs`` gives those of the decoder and of multi-token prediction for a virtual stage.

    The layers of a hybrid model are Megatron's own, those of its pattern in the roles of Transformer Engine's.
    """
    stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    is_rotary = world.rotary or world.is_set("multi_latent_attention")
    chunks = []
    for vp_stage in range(stages) if stages else (None,):
        common = {
            "vocab_size": world.vocab_size,
            "max_sequence_length": world.seq_length,
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            "share_embeddings_and_output_weights": world.tied_embeddings,
            "position_embedding_type": "rope" if is_rotary else "learned_absolute",
            "vp_stage": vp_stage,
            **options,
        }
        if world.is_hybrid:
            chunk = _hybrid_model(config, world.hybrid_layer_pattern, common)
        else:
            decoder, prediction = specs(vp_stage)
            chunk = GPTModel(config, decoder, mtp_block_spec=prediction, **common)
        chunk = chunk.cuda()
        chunk.vp_stage = vp_stage
        chunks.append(chunk)
    return chunks


def _hybrid_model(config: TransformerConfig, pattern: str, options: Mapping[str, Any]) -> Any:
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return HybridModel(config, hybrid_stack_spec, hybrid_layer_pattern=pattern, **options)


def wrapped(chunks: Sequence[GPTModel], ddp_config: DistributedDataParallelConfig) -> list[DistributedDataParallel]:
    """Wrap chunks for their precision and for data parallelism, as Megatron's trainer does it."""
    config = chunks[0].config
    models = [Float16Module(config, chunk) for chunk in chunks] if config.bf16 or config.fp16 else chunks
    return [DistributedDataParallel(config, ddp_config, model, disable_bucketing=at > 0) for at, model in enumerate(models)]


def connect(chunks: Sequence[DistributedDataParallel]) -> None:
    """Write into the configuration what Megatron's training loop writes before the first step: calls of the schedules."""
    config, ddp = chunks[0].config, chunks[0].ddp_config
    config.finalize_model_grads_func = finalize_model_grads
    if ddp.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
        if ddp.align_param_gather:
            config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in chunks])
    if ddp.overlap_param_gather and ddp.align_param_gather:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in chunks])


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions
