"""Steps of a pipeline on one rank of the pool: stages that sleep, and a small GPT that computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, UntypedStorage

from mindspeed.pipeline.megatron import Engine
from mindspeed.pipeline.operations import Costs, PipelineShape, Schedule
from mindspeed.pipeline.recording import agreed_costs
from mindspeed.pipeline.running_step import running_step
from mindspeed.pipeline.search import fastest
from mindspeed.pipeline.simulator import judge, period
from mindspeed.pipeline.synthesis import megatron
from mindspeed.plugins import active_feature

NAP = 0.02
"""Seconds of a forward pass, an input gradient and a weight gradient of a stage that sleeps."""


class SleepingProduct:
    """A weight gradient that sleeps."""

    weight = torch.zeros(1)

    def storages(self) -> list[UntypedStorage]:
        return []

    def prepare(self) -> None:
        pass

    def add(self, before: Tensor | None) -> Tensor | None:
        time.sleep(NAP)
        return None


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        time.sleep(NAP)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        queue = running_step().queue
        if queue is not None and queue.collecting is not None:
            queue.push(queue.collecting, SleepingProduct())
            time.sleep(NAP)
        else:
            time.sleep(2 * NAP)
        return gradients[0]


class SleepingChunk(MegatronModule):
    """A model chunk that sleeps in place of its layers."""

    def __init__(self, config: TransformerConfig, stage: int) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = stage
        self.given: Tensor | None = None

    def set_input_tensor(self, given: list[Tensor | None]) -> None:
        self.given = given[0]

    def forward(self, *inputs: Any, **more: Any) -> Tensor:
        given = torch.zeros(4, 1, 8).cuda().requires_grad_() if self.given is None else self.given
        if self.config.recompute_granularity is not None:
            repeated: Tensor = tensor_parallel.checkpoint(_Sleep.apply, False, given)
            return repeated
        output: Tensor = _Sleep.apply(given)  # type: ignore[no-untyped-call]
        return output


def sleeping_chunks(count: int) -> list[Any]:
    config = TransformerConfig(num_layers=8, hidden_size=8, num_attention_heads=1, pipeline_dtype=torch.float32)
    return [SleepingChunk(config, stage) for stage in range(count)]


def gpt_chunks(count: int, length: int, hidden: int) -> list[Any]:
    config = TransformerConfig(
        num_layers=8,
        hidden_size=hidden,
        num_attention_heads=8,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        pipeline_dtype=torch.float32,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    stages = [stage if count > 1 else None for stage in range(count)]
    places = [{"ignore_virtual": False, "vp_stage": stage} for stage in stages]
    chunks = [
        GPTModel(
            config,
            get_gpt_layer_local_spec(),
            128,
            length,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            vp_stage=place["vp_stage"],
        )
        for place in places
    ]
    for chunk, stage in zip(chunks, stages, strict=True):
        chunk.vp_stage = stage
    return chunks


def _forward(length: int, iterator: Any, chunk: Any) -> Any:
    tokens = torch.zeros(1, length, dtype=torch.long)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    output = chunk(tokens, torch.arange(length)[None], mask, labels=tokens)
    return output, lambda output: (output.float().mean(), {})


def _seconds(schedule: Callable[..., Any], chunks: list[Any], micro_batches: int, length: int) -> float:
    """The time of a step from a common start to the end of the last rank."""
    dist.barrier()
    start = time.perf_counter()
    schedule(
        forward_step_func=partial(_forward, length),
        data_iterator=[None] * len(chunks),
        model=chunks,
        num_microbatches=micro_batches,
        seq_length=length,
        micro_batch_size=1,
    )
    spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()


def sleeping_step(micro_batches: int) -> None:
    """Run a step of the active plan's schedule, Megatron's own or a list, on two stages that sleep."""
    _seconds(schedules.get_forward_backward_func(), sleeping_chunks(2), micro_batches, 4)


class _SleepingStage(SleepingChunk):
    """A model chunk that sleeps and has a weight."""

    def __init__(self, config: TransformerConfig, stage: int) -> None:
        super().__init__(config, stage)
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, *inputs: Any, **more: Any) -> Tensor:
        return super().forward() * self.weight


def overlapped(micro_batches: int, steps: int, rounds: int, nap: float) -> dict[str, Any]:
    """Seconds per step of stages that sleep and an optimizer, by turns synchronized and validated later.

    A synchronized step runs the list with the least makespan, the others that with the least period.
    """
    global NAP
    NAP = nap
    engine: Engine = active_feature("zero-bubble").engine
    validation, overlapping = engine.validation, engine.plan
    config = TransformerConfig(num_layers=8, hidden_size=8, num_attention_heads=1, pipeline_dtype=torch.float32)

    def alone(shape: PipelineShape, costs: Costs) -> Schedule:
        return fastest(shape, costs)[0]

    candidates = {
        "synchronized": (None, alone),
        "validated later": (validation, overlapping),
        "synchronized again": (None, alone),
    }
    times: dict[str, list[float]] = {name: [] for name in candidates}
    lists = {}
    for _ in range(rounds):
        for name, (chosen, plan) in candidates.items():
            engine.validation, engine.plan = chosen, plan
            engine._lists.clear()
            chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), _SleepingStage(config, 0))
            optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-6, clip_grad=1e6), [chunk])
            for step in range(1 + steps):
                if step == 1:
                    optimizer.state_dict()  # validates the step that warms up
                    dist.barrier()
                    start = time.perf_counter()
                chunk.zero_grad_buffer()
                optimizer.zero_grad()
                engine(
                    forward_step_func=partial(_forward, 4),
                    data_iterator=[None],
                    model=[chunk],
                    num_microbatches=micro_batches,
                    seq_length=4,
                    micro_batch_size=1,
                )
                optimizer.step()
            optimizer.state_dict()
            spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            times[name].append(spent.item() / steps)
            lists[name] = engine.lists(PipelineShape(dist.get_world_size(), 1, micro_batches), forward_only=False)[0]
    synchronized = judge(lists["synchronized"]).makespan
    makespan = judge(lists["validated later"]).makespan
    expected = ((steps - 1) * period(lists["validated later"], Costs()) + makespan) / steps
    return {"times": times, "expected": expected / synchronized}


def measured(feature: str, vpp: int, micro_batches: int, rounds: int, hidden: int, trace: str) -> dict[str, Any]:
    """Times of steps in turn: Megatron's schedule twice, the feature's, and Megatron's list on the engine.

    ``hidden`` is the width of a GPT; 0 for stages that sleep. A last step is recorded in the folder ``trace``, and simulated
    with its own mean durations.
    """
    length = 4 if hidden == 0 else 128
    chunks = sleeping_chunks(vpp) if hidden == 0 else gpt_chunks(vpp, length, hidden)
    own = schedules.forward_backward_pipelining_with_interleaving
    if vpp == 1:
        own = schedules.forward_backward_pipelining_without_interleaving
    engine: Engine = active_feature(feature).engine
    listed = Engine(feature, lambda shape, costs: megatron(shape), engine.links)
    candidates: dict[str, Any] = {"Megatron": own, "ours": engine, "Megatron again": own, "Megatron's list": listed}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, schedule in candidates.items():
            seconds = _seconds(schedule, chunks, micro_batches, length)
            if turn:
                times[name].append(seconds)
    engine.trace = trace
    recorded = _seconds(engine, chunks, micro_batches, length)
    (schedule,) = (made for (_, forward_only), (made, _) in engine._lists.items() if not forward_only)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    simulated = judge(schedule, agreed_costs(engine.recorded, schedule.shape, rank, Costs())).makespan / 1e3
    return {"times": times, "recorded": recorded, "simulated": simulated, "floor": judge(schedule).floor}
