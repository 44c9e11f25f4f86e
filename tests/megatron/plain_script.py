"""A training script as third parties write them: megatron-core, torch.cuda and NCCL, nothing else.

It prints ``{"losses": [...], "norms": [...], "layout": {...}}`` on the last rank. Weights and data depend on neither the
layout nor the number of processes, so every layout must print the same losses and gradient norms.

    torchrun --nproc-per-node 2 plain_script.py --tp 2 --sequence-parallel
"""

import argparse
import inspect
import json
import os
import zlib

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_batch_on_this_cp_rank, get_model_config, unwrap_model

VOCABULARY = 128


def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--vpp", type=int)
    parser.add_argument("--overlap-p2p", action="store_true")
    parser.add_argument("--batched-p2p", action="store_true")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--etp", type=int, help="ranks that share an expert; as many as --tp without it")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--grouped-experts", action="store_true", help="one module for all experts of a rank")
    parser.add_argument("--dispatcher", choices=["allgather", "alltoall"], default="allgather")
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--overlap-grad-reduce", action="store_true")
    parser.add_argument("--overlap-param-gather", action="store_true")
    parser.add_argument("--recompute", choices=["full", "selective"])
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--llama", action="store_true", help="RMSNorm, SwiGLU, rotary positions, grouped queries")
    parser.add_argument("--latent", action="store_true", help="multi-latent attention")
    parser.add_argument("--further-tokens", type=int, help="layers for multi-token prediction")
    parser.add_argument("--per-token", action="store_true", help="divide by the tokens of a whole step")
    parser.add_argument("--share-sequence", action="store_true", help="slice every batch over context-parallel ranks")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--gradients", help="folder for the gradients of the first step, one file per rank")
    parser.add_argument("--balance", type=float, default=0.0, help="coefficient of the auxiliary loss of experts")
    parser.add_argument("--save")
    parser.add_argument("--load")
    return parser.parse_args(argv)


def make_config(args):
    style = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "num_query_groups": 2}
    experts = {
        "num_moe_experts": args.experts,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": args.dispatcher,
        "moe_grouped_gemm": args.grouped_experts,
        "moe_router_load_balancing_type": "aux_loss" if args.balance else "none",
        "moe_aux_loss_coeff": args.balance,
        "expert_model_parallel_size": args.ep,
        "expert_tensor_parallel_size": args.etp,
    }
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    recompute = {None: {}, "full": full, "selective": {"recompute_granularity": "selective"}}[args.recompute]
    latent = {
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 10,
        "original_max_position_embeddings": 16,
        "mscale_all_dim": 0.5,
    }
    return (MLATransformerConfig if args.latent else TransformerConfig)(
        num_layers=args.layers,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        add_bias_linear=not args.llama and not args.experts,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp,
        overlap_p2p_comm=args.overlap_p2p,
        batch_p2p_comm=args.batched_p2p,
        sequence_parallel=args.sequence_parallel,
        pipeline_dtype={"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype],
        params_dtype={"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype],
        bf16=args.dtype == "bf16",
        fp16=args.dtype == "fp16",
        hidden_dropout=args.dropout,
        attention_dropout=args.dropout,
        gradient_accumulation_fusion=False,
        mtp_num_layers=args.further_tokens,
        calculate_per_token_loss=args.per_token,
        **(style if args.llama else {}),
        **(latent if args.latent else {}),
        **(experts if args.experts else {}),
        **recompute,
    )


def make_model(args, config):
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=args.distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        bucket_size=4096 if args.overlap_grad_reduce else None,
    )
    chunks = []
    stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    for stage in range(stages or 1):
        vp_stage = stage if stages else None
        spec = get_gpt_layer_local_spec(
            num_experts=args.experts,
            moe_grouped_gemm=args.grouped_experts,
            multi_latent_attention=args.latent,
            normalization="RMSNorm" if args.llama else "LayerNorm",
        )
        further = None
        if args.further_tokens:
            further = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=args.sequence,
            position_embedding_type="rope" if args.llama or args.latent else "learned_absolute",
            mtp_block_spec=further,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        chunk.cuda(torch.cuda.current_device())
        fill_weights(chunk)
        chunks.append(chunk)
    if args.dtype != "fp32":
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    return [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]


def fill_weights(chunk):
    """Fill every weight from its global name and position, so that each layout gets its share of the same weights."""
    for value in chunk.sharded_state_dict().values():
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and value.data is not None and value.data.dim() > 1:
            with torch.no_grad():
                value.data.copy_(_share(value).reshape(value.data.shape))


def _share(value):
    """This rank's share of a full weight, whose parts have names of their own where Megatron cuts it."""
    if isinstance(value, ShardedTensorFactory):
        return value.merge_fn(_share(value.build()))
    if isinstance(value, dict):
        return {name: _share(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_share(part) for part in value]
    generator = torch.Generator().manual_seed(zlib.crc32(value.key.encode()))
    whole = torch.randn(value.global_shape, generator=generator) * 0.05
    extent = [1] * value.prepend_axis_num + list(value.data.shape)
    share = whole[tuple(slice(start, start + size) for start, size in zip(value.global_offset, extent, strict=True))]
    return share.reshape(value.data.shape).to(value.data.device)


def make_optimizer(args, model):
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.01,
        bf16=args.dtype == "bf16",
        fp16=args.dtype == "fp16",
        initial_loss_scale=2.0**10,
        params_dtype=get_model_config(model[0]).params_dtype,
        use_distributed_optimizer=args.distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
        clip_grad=1.0,
    )
    return get_megatron_optimizer(config, model)


def connect(args, model, optimizer):
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in model]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]


def micro_batches(args, step):
    """Samples of this data-parallel rank for one step; every sample is known by its place in the global batch."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for sample in range(rank, args.global_batch, size):
        generator = torch.Generator().manual_seed(step * args.global_batch + sample)
        yield torch.randint(VOCABULARY, (1, args.sequence + 1), generator=generator)


def forward_step(batches, model):
    tokens = next(batches).cuda(non_blocking=True)
    length = tokens.shape[1] - 1
    positions = torch.arange(length, dtype=torch.long, device=torch.cuda.current_device()).unsqueeze(0)
    mask = torch.tril(torch.ones((1, 1, length, length), device=torch.cuda.current_device())) < 0.5
    output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())

    def loss_func(output):
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return output, loss_func


def forward_share_step(batches, model):
    """As `forward_step` for a share of the tokens, of which those of the first quarter of the sequence do not count."""
    tokens = next(batches).cuda(non_blocking=True)
    length = tokens.shape[1] - 1
    counts = torch.ones(tokens[:, 1:].shape, device=torch.cuda.current_device())
    counts[:, : length // 4] = 0
    batch = {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": counts,
        "position_ids": torch.arange(length, device=torch.cuda.current_device()).unsqueeze(0),
        "attention_mask": torch.tril(torch.ones((1, 1, length, length), device=torch.cuda.current_device())) < 0.5,
    }
    hybrid = {"is_hybrid_cp": False} if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters else {}
    share = get_batch_on_this_cp_rank(batch, **hybrid)  # Megatron 0.18 and later want to be told
    counts = share.pop("loss_mask")
    output = model(share["tokens"], share["position_ids"], share["attention_mask"], labels=share["labels"], loss_mask=counts)

    def loss_func(output):
        total, number = (output.float() * counts).sum(), counts.sum()
        return total, number.int(), {"loss": torch.stack([total.detach(), number])}

    return output, loss_func


def train_step(args, model, optimizer, step):
    """Loss and gradient norm of a step."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    count = args.global_batch // parallel_state.get_data_parallel_world_size()
    reduced = get_forward_backward_func()(
        forward_step_func=forward_share_step if args.share_sequence else forward_step,
        data_iterator=[micro_batches(args, step) for _ in model] if len(model) > 1 else micro_batches(args, step),
        model=model if len(model) > 1 else model[0],
        num_microbatches=count,
        seq_length=args.sequence,
        micro_batch_size=1,
        forward_only=False,
    )
    if args.gradients and step == 0:
        shares = [share for chunk in model for share in gradients(unwrap_model(chunk))]
        os.makedirs(args.gradients, exist_ok=True)
        torch.save(shares, os.path.join(args.gradients, f"{torch.distributed.get_rank()}.pt"))
    updated, norm, _ = optimizer.step()
    assert updated, "the optimizer skipped a step"
    loss = torch.zeros(2, device="cuda")
    if reduced:
        rows = torch.stack([row["loss"] for row in reduced])
        loss = rows.sum(0) if args.share_sequence else torch.stack([rows.sum(), torch.tensor(float(count))])
        torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return (loss[0] / loss[1]).item(), float(norm)


def gradients(chunk):
    """Name, shape and place in the whole model of every share of a gradient that this rank has, and the share."""
    buffers = {parameter.data_ptr(): parameter.main_grad for parameter in chunk.parameters()}
    for value in chunk.sharded_state_dict().values():
        data = value.data if isinstance(value, ShardedTensor | ShardedTensorFactory) else None
        if data is not None and data.data_ptr() in buffers:
            value.data = buffers[data.data_ptr()].view_as(data)
            yield from _shares(value.build() if isinstance(value, ShardedTensorFactory) else value)


def _shares(value):
    if isinstance(value, ShardedTensor):
        extent = [1] * value.prepend_axis_num + list(value.data.shape)
        yield value.key, value.global_shape, value.global_offset, value.data.reshape(extent).clone()
        return
    for part in value.values() if isinstance(value, dict) else value:
        yield from _shares(part)


def checkpoint_state(model, optimizer, is_loading=False):
    state = {f"model{index}": unwrap_model(chunk).sharded_state_dict() for index, chunk in enumerate(model)}
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=is_loading)
    return state


def run(args):
    """Make Megatron's groups in the process group that is already there, train, and destroy them again."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=args.etp,
    )
    result = train(args)
    parallel_state.destroy_model_parallel()
    return result


def train(args):
    """The loss and the gradient norm of every step, and the layout."""
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    model = make_model(args, make_config(args))
    optimizer = make_optimizer(args, model)
    connect(args, model, optimizer)
    layout = describe(model)
    first = 0
    if args.load:
        state = checkpoint_state(model, optimizer, is_loading=True)
        loaded = dist_checkpointing.load({**state, "step": None}, args.load)
        for index, chunk in enumerate(model):
            unwrap_model(chunk).load_state_dict(loaded[f"model{index}"])
        optimizer.load_state_dict(loaded["optimizer"])
        first = loaded["step"]
    steps = [train_step(args, model, optimizer, step) for step in range(first, first + args.steps)]
    if args.save:
        if torch.distributed.get_rank() == 0:
            os.makedirs(args.save)
        torch.distributed.barrier()
        dist_checkpointing.save({**checkpoint_state(model, optimizer), "step": first + args.steps}, args.save)
    return [loss for loss, _ in steps], [norm for _, norm in steps], layout


def describe(model):
    """What the model was really built as."""
    config, ddp_config = get_model_config(model[0]), model[0].ddp_config
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "chunks": len(model),
        "sequence_parallel": config.sequence_parallel,
        "overlap_p2p": config.overlap_p2p_comm,
        "recompute": config.recompute_granularity,
        "dispatcher": config.moe_token_dispatcher_type if config.num_moe_experts else None,
        "distributed_optimizer": ddp_config.use_distributed_optimizer,
        "overlap_grad_reduce": ddp_config.overlap_grad_reduce,
        "overlap_param_gather": ddp_config.overlap_param_gather,
    }


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    losses, norms, layout = run(parse())
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(json.dumps({"losses": losses, "norms": norms, "layout": layout}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
