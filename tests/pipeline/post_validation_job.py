"""Optimizer steps that are validated later against synchronized ones, on one rank of the pool."""

import copy
import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed.engine.runtime import session
from mindspeed.megatron.training_hook_wrappers import LoopState
from mindspeed.plugins import active_feature
from tests.pipeline.steps_job import HIDDEN, LENGTH, VOCABULARY, run, seed_everything

CLIP = 2.0


Step = tuple[int, float]
"""Pipeline stage, and the factor of its gradients before a step of the optimizer."""


def build(dtype: str, sharded: bool, **arguments: Any) -> list[Any]:
    """This rank's chunks of a GPT model with dropout."""
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype)
    precision = {dtype: True, "params_dtype": half} if half else {}
    config = TransformerConfig(
        num_layers=8,
        hidden_size=HIDDEN,
        ffn_hidden_size=32,
        num_attention_heads=4,
        attention_dropout=0.1,
        hidden_dropout=0.1,
        masked_softmax_fusion=False,
        pipeline_dtype=half or torch.float32,
        deallocate_pipeline_outputs=True,
        **precision,
        **arguments,
    )
    config.finalize_model_grads_func = finalize_model_grads
    seed_everything(0)
    chunks = []
    stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    for stage in range(stages or 1):
        place = {"ignore_virtual": False, "vp_stage": stage if stages else None}
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(config.num_moe_experts),
            VOCABULARY,
            LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=False,
            vp_stage=place["vp_stage"],
        ).cuda()
        wrapped = Float16Module(config, chunk) if half else chunk
        wrapped.vp_stage = place["vp_stage"]
        options = DistributedDataParallelConfig(
            use_distributed_optimizer=sharded, overlap_grad_reduce=sharded, bucket_size=2000, grad_reduce_in_fp32=True
        )
        chunks.append(DistributedDataParallel(config, options, wrapped))
    config.no_sync_func = [chunk.no_sync for chunk in chunks]
    return chunks


def assembled(dtype: str, sharded: bool, optimizer_name: str, arguments: dict[str, Any]) -> LoopState:
    """A model with its optimizer and learning rate."""
    chunks = build(dtype, sharded, **arguments)
    scaled = {"initial_loss_scale": 4096.0, "loss_scale_window": 3, "hysteresis": 1} if dtype == "fp16" else {}
    config = OptimizerConfig(
        optimizer=optimizer_name,
        lr=1e-2,
        min_lr=1e-3,
        clip_grad=CLIP,
        weight_decay=0.1,
        fp16=dtype == "fp16",
        bf16=dtype == "bf16",
        params_dtype=chunks[0].config.params_dtype,
        use_distributed_optimizer=sharded,
        **scaled,
    )
    optimizer = get_megatron_optimizer(config, chunks)
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=2,
        lr_decay_steps=20,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.2,
        wd_incr_steps=20,
        wd_incr_style="linear",
    )
    return LoopState(chunks, optimizer, scheduler)


def resumed(state: LoopState, *given: Any) -> LoopState:
    """The state of another process that loads what this one saves: weights first, as Megatron does."""
    with session.around("around_save", step=state.step):
        weights = [copy.deepcopy(chunk.module.state_dict()) for chunk in state.chunks]
        saved = copy.deepcopy((state.optimizer.state_dict(), state.scheduler.state_dict()))
    again = assembled(*given)
    for chunk, values in zip(again.chunks, weights, strict=True):
        chunk.module.load_state_dict(values)
    optimizer, scheduler = saved
    again.optimizer.load_state_dict(optimizer)
    again.scheduler.load_state_dict(scheduler)
    again.step = state.step
    return again


def trained(validation: Any, steps: list[Step], resume: int | None, *given: Any) -> dict[str, Any]:
    """Train; return the losses of each step, weights, optimizer states, loss scale and position of the learning rate.

    Behind step ``resume`` another process goes on.
    """
    engine = active_feature("zero-bubble").engine
    engine.validation = validation
    state = assembled(*given)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    losses, norms = [], []
    for changed, factor in steps:
        with session.around("around_train_step", state=state):
            for chunk in state.chunks:
                chunk.train()
                chunk.zero_grad_buffer()
            state.optimizer.zero_grad()
            losses.append(run(engine, state.chunks, 10 * state.step))
            if changed == stage and factor != 1:
                for parameter in state.chunks[0].parameters():
                    parameter.main_grad.mul_(factor)
            updated, norm, _ = state.optimizer.step()
            norms.append(norm)
            if updated:
                state.scheduler.step(increment=1)
        state.step += 1
        if state.step == resume:
            state = resumed(state, *given)
    state.optimizer.state_dict()  # validates the last step
    logged = get_moe_layer_wise_logging_tracker()
    sums = {name: entry["values"].tolist() for name, entry in logged.items()}
    logged.clear()
    inner = inner_optimizers(state.optimizer)
    main = [weight.detach().clone() for one in inner for weight in weights_of(one)]
    moments = [
        value.clone() if isinstance(value, torch.Tensor) else value
        for one in inner
        for weight in weights_of(one)
        for _, value in sorted(one.state[weight].items())
    ]
    weights = [parameter.detach().clone() for chunk in state.chunks for parameter in chunk.parameters()]
    buffers = [buffer.clone() for chunk in state.chunks for buffer in torch.nn.Module.buffers(chunk)]
    return {
        "losses": losses,
        "tensors": [*main, *moments, *weights, *buffers],
        "scale": state.optimizer.get_loss_scale().item(),
        "scheduled": state.scheduler.num_steps,
        "rates": [(group["lr"], group["weight_decay"]) for group in state.optimizer.param_groups],
        "logged": sums,
        "norms": norms,
    }


def inner_optimizers(optimizer: Any) -> list[Any]:
    return [member.optimizer for member in getattr(optimizer, "chained_optimizers", [optimizer])]


def weights_of(inner: Any) -> list[Any]:
    return [weight for group in inner.param_groups for weight in group["params"]]


def compared(
    steps: list[Step],
    dtype: str,
    sharded: bool,
    optimizer: str = "adam",
    arguments: dict[str, Any] | None = None,
    resume: int | None = None,
) -> dict[str, Any]:
    """What differs between steps that are synchronized and those that are validated later, and how many were repeated.

    Only the latter are saved and resumed.
    """
    validation = active_feature("zero-bubble").engine.validation
    given = (dtype, sharded, optimizer, arguments or {})
    expected = trained(None, steps, None, *given)
    actual = trained(validation, steps, resume, *given)
    pairs = list(zip(expected.pop("tensors"), actual.pop("tensors"), strict=True))
    return {
        "expected": expected,
        "actual": actual,
        "tensors": len(pairs),
        "different": sum(not equal(left, right) for left, right in pairs),
        "repeated": validation.repeated,
        "finite": all(math.isfinite(loss) for step in actual["losses"] for loss in step),
    }


def equal(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
