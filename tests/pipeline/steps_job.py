"""Steps of one model under Megatron's own schedule and under a list of operations, on one rank of the pool."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mindspeed.megatron.gpt import connect
from mindspeed.memory.meter import Meter
from mindspeed.pipeline import megatron
from mindspeed.pipeline.executor import execute
from mindspeed.pipeline.megatron_stages import MegatronStages
from mindspeed.pipeline.operations import Costs, Op, PipelineShape, Schedule
from mindspeed.pipeline.running_step import running_step
from mindspeed.pipeline.simulator import judge
from mindspeed.pipeline.synthesis import delayed
from mindspeed.pipeline.synthesis import megatron as megatron_order
from mindspeed.pipeline.weight_gradients import WeightGradients
from mindspeed.plugins import active_feature
from mindspeed.problems import MindSpeedError, RunError

MICRO_BATCHES, LENGTH, HIDDEN, VOCABULARY = 4, 12, 16, 32
Unit = tuple[int, int]


def build(tied: bool, ddp: DistributedDataParallelConfig | None = None, **arguments: Any) -> list[Any]:
    """This rank's chunks of a GPT model with dropout."""
    config = TransformerConfig(
        num_layers=8,
        hidden_size=HIDDEN,
        ffn_hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.1,
        hidden_dropout=0.1,
        masked_softmax_fusion=False,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        **arguments,
    )
    config.finalize_model_grads_func = finalize_model_grads
    seed_everything(0)
    spec = get_gpt_layer_local_spec(config.num_moe_experts)
    chunks = []
    stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    for stage in range(stages or 1):
        place = {"ignore_virtual": False, "vp_stage": stage if stages else None}
        mtp = None
        if config.mtp_num_layers:
            mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=place["vp_stage"])
        chunk = GPTModel(
            config,
            spec,
            VOCABULARY,
            LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=tied,
            mtp_block_spec=mtp,
            vp_stage=place["vp_stage"],
        ).cuda()
        chunk.vp_stage = place["vp_stage"]
        chunks.append(DistributedDataParallel(config, ddp or DistributedDataParallelConfig(), chunk))
    return chunks


class Alive:
    """The units of which a saved activation exists or waits for its weight gradient, over a step."""

    def __init__(self) -> None:
        self.counts: Counter[Unit] = Counter()
        self.peak = 0

    def hooks(self, unit: Unit) -> Any:
        """Count what autograd saves in a forward pass of a unit."""

        class Saved:
            def __init__(self, tensor: Tensor) -> None:
                self.tensor = tensor

        def pack(tensor: Tensor) -> Saved:
            saved = Saved(tensor)
            self.counts[unit] += 1
            queue = running_step().queue
            waiting = queue._queue.keys() if queue is not None else ()
            self.peak = max(self.peak, len({*+self.counts, *waiting}))
            weakref.finalize(saved, self._gone, unit)
            return saved

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor)

    def _gone(self, unit: Unit) -> None:
        self.counts[unit] -= 1


def batches(seed: int) -> Iterator[Tensor]:
    for number in range(MICRO_BATCHES):
        yield torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator("cpu").manual_seed(seed + number)).cuda()


def forward(alive: Alive | None, numbers: dict[int, Iterator[int]], iterator: Iterator[Tensor], chunk: Any) -> Any:
    samples = next(iterator)
    tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
    positions = torch.arange(LENGTH, device=tokens.device).expand_as(tokens)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
    stage = chunk.module.vp_stage or 0
    with alive.hooks((stage, next(numbers[stage]))) if alive is not None else nullcontext():
        output = chunk(tokens, positions, mask, labels=labels)
    per_token = chunk.config.calculate_per_token_loss

    def loss(losses: Tensor) -> Any:
        total = losses.float().sum()
        count = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
        if per_token:
            return total, count, {"loss": total.detach().clone()}
        return total / count, {"loss": (total / count).detach()}

    return output, loss


def seed_everything(seed: int) -> None:
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    torch.manual_seed(seed)


def run(
    schedule: Callable[..., Any], chunks: list[Any], seed: int, alive: Alive | None = None, only_forward: bool = False
) -> Any:
    seed_everything(seed)
    numbers = {stage: iter(range(MICRO_BATCHES)) for stage in range(len(chunks))}
    losses = schedule(
        forward_step_func=partial(forward, alive, numbers),
        data_iterator=[batches(seed) for _ in chunks],
        model=chunks,
        num_microbatches=MICRO_BATCHES,
        seq_length=LENGTH,
        micro_batch_size=2,
        forward_only=only_forward,
    )
    return [entry["loss"].item() for entry in losses]


def train(schedule: Callable[..., Any], chunks: list[Any]) -> tuple[list[float], dict[str, Tensor]]:
    """A step, an evaluation and another step, whose gradients add up; the losses and the gradients."""
    for chunk in chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    losses = run(schedule, chunks, 1)
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        losses += run(schedule, chunks, 2, only_forward=True)
    for chunk in chunks:
        chunk.train()
    losses += run(schedule, chunks, 3)
    grads = {
        f"{number}.{name}": parameter.main_grad.clone()
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    return losses, grads


def own_function(chunks: list[Any]) -> Callable[..., Any]:
    """Megatron's own schedule, called behind the hooks of features."""
    if len(chunks) == 1:
        return schedules.forward_backward_pipelining_without_interleaving
    return schedules.forward_backward_pipelining_with_interleaving


def recomputed_ahead(feature: str, engine_of: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What differs between Megatron's recompute and the one ahead of gradients, and how many units R restored.

    The schedule is Megatron's own, or the list of the feature ``engine_of``.
    """
    recompute = active_feature(feature)
    engine = active_feature(engine_of).engine if engine_of else None
    chunks = build(False, **arguments)
    expected_losses, expected = train(own_function(chunks), chunks)
    losses, actual = train(schedules.get_forward_backward_func(), chunks)
    shape = PipelineShape(parallel_state.get_pipeline_model_parallel_world_size(), len(chunks), MICRO_BATCHES)
    planned = recompute.planned_schedule(shape, Costs())
    if engine is not None:
        (planned,) = (made for (_, forward_only), (made, _) in engine._lists.items() if not forward_only)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    listed = [shape.stage_of(rank, op.chunk) for op in planned.ops[rank] if op.kind == "R"]
    return {
        "losses": (expected_losses, losses),
        "zero": [name for name, gradient in actual.items() if not gradient.any()],
        "different": [name for name in expected if not torch.equal(expected[name], actual[name])],
        "recomputed": engine.recomputed if engine is not None else recompute.recomputed,
        "listed": sum(engine is not None or stage + 1 < shape.stages for stage in listed),
        "kinds": "".join(op.kind for op in planned.ops[rank]),
        "recorded": "".join(line.op.kind for line in recompute.recorded),
    }


def compared(feature: str, tied: bool, arguments: dict[str, Any]) -> dict[str, Any]:
    """What differs between Megatron's own schedule and the feature's, and what the engine counts."""
    engine = active_feature(feature).engine
    chunks = build(tied, **arguments)
    own = own_function(chunks)
    expected_losses, expected = train(own, chunks)
    losses, actual = train(engine, chunks)
    alive = Alive()
    run(engine, chunks, 1, alive)
    (schedule,) = (made for (_, forward_only), (made, _) in engine._lists.items() if not forward_only)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    return {
        "losses": (expected_losses, losses),
        "gradients": len(actual),
        "zero": [name for name, gradient in actual.items() if not gradient.any()],
        "different": [name for name in expected if not torch.equal(expected[name], actual[name])],
        "recomputed": engine.recomputed,
        "listed": sum(op.kind == "R" for op in schedule.ops[rank]),
        "bytes": engine.bytes_sent,
        "peak": alive.peak,
        "planned": judge(schedule).peak[rank],
    }


def reductions(feature: str, arguments: dict[str, Any]) -> dict[str, int]:
    """How many buckets of a step start their reduction inside and outside of the computation of gradients.

    Megatron counts the gradients of a bucket in a first step. Its trainer gives a function that starts all reductions of a
    chunk, and so does ours.
    """
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, align_param_gather=True, bucket_size=4000)
    chunks = build(False, ddp, **arguments)
    connect(chunks)
    engine, depth, counts = active_feature(feature).engine, 0, Counter[str]()

    def computing(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(*given: Any, **named: Any) -> Any:
            nonlocal depth
            depth += 1
            made = function(*given, **named)
            depth -= 1
            return made

        return called

    start = _ParamAndGradBucketGroup.start_grad_sync

    def counted(group: Any, *given: Any, **named: Any) -> Any:
        counts["inside" if depth else "outside"] += 1
        return start(group, *given, **named)

    for seed in (1, 2):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        counts.clear()
        with (
            mock.patch.object(schedules, "backward_step", computing(schedules.backward_step)),
            mock.patch.object(WeightGradients, "run", computing(WeightGradients.run)),
            mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync", counted),
        ):
            run(engine, chunks, seed)
    return {place: counts[place] for place in ("inside", "outside")}


def predicted(feature: str) -> dict[str, Any]:
    """The losses of multi-token prediction of a step, summed where they are computed, and Megatron's log of them."""
    chunks = build(False, mtp_num_layers=1)
    saved: list[float] = []
    logged: dict[str, Tensor] = {}
    save = MTPLossLoggingHelper.save_loss_to_tracker

    def counted(loss: Tensor, *given: Any, **named: Any) -> None:
        saved.append(loss.item())
        save(loss, *given, **named)

    with mock.patch.object(MTPLossLoggingHelper, "save_loss_to_tracker", counted):
        for seed in (1, 2 + parallel_state.get_data_parallel_rank()):
            saved.clear()
            run(active_feature(feature).engine, chunks, seed)
            logged.clear()
            MTPLossLoggingHelper.track_mtp_metrics(1.0, seed, None, None, logged)
    return {"saved": sum(saved), "logged": {name: loss.item() for name, loss in logged.items()}}


def predicted_apart(layout: str) -> bool | str:
    """Whether Megatron exchanges shapes because of a stage for multi-token prediction, or the message that refuses it."""
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    shape = {"num_layers": 8, "hidden_size": HIDDEN, "num_attention_heads": 4, "mtp_num_layers": 1}
    try:
        return TransformerConfig(**shape, **sizes, pipeline_model_parallel_layout=layout).mtp_standalone
    except MindSpeedError as error:
        (problem,) = error.problems
        return f"{problem.message} | {problem.fix_text}"


def swapped(feature: str) -> list[dict[str, Any]]:
    """The most units of the queue that are on the device, the bytes there and those that left it.

    In three steps with the weight gradients of rank 1 behind: two chunk-steps, three, and three with the queue on the host.
    """
    engine = active_feature(feature).engine
    buffers, chunks, found = engine.host, build(False), []
    for lag, host in ((2, None), (3, None), (3, buffers)):
        engine.host = host
        engine.plan = lambda shape, costs, lag=lag: delayed(megatron_order(shape), (0, lag))
        engine._lists.clear()
        run(engine, chunks, 1)
        most, unit, moved = 0, 0, 0

        def counted(schedule: Schedule, rank: int, step: Any, channels: Any, **more: Any) -> None:
            """Count after each operation what is left of the storages of each unit that waits."""

            def count(*times: Any) -> None:
                nonlocal most, unit
                sizes = [sum(part.nbytes() for part in step.queue.storages_of(waiting)) for waiting in step.queue._queue]
                most, unit = max(most, sum(size > 0 for size in sizes)), max(unit, *sizes, 0)

            nonlocal moved
            execute(schedule, rank, step, channels, count, **more)
            moved = step.queue.host.bytes if step.queue.host is not None else 0

        with mock.patch.object(megatron, "execute", counted), Meter() as meter:
            run(engine, chunks, 1)
        found.append({"most": most, "unit": unit, "peak": meter.peak.device, "bytes": moved})
    return found


def tied() -> str:
    """The message and the fix with which a model with tied embeddings is refused, while its stages are built."""
    with pytest.raises(MindSpeedError) as refusal:
        build(True)
    (problem,) = refusal.value.problems
    return f"{problem.message} | {problem.fix_text}"


def out_of_order(feature: str) -> dict[str, Any]:
    """What a list with two W exchanged does: the problem, and without the check the gradients that differ."""
    engine = active_feature(feature).engine
    chunks = build(False)
    own = schedules.forward_backward_pipelining_without_interleaving
    _, expected = train(own, chunks)
    plan = engine.plan
    engine.plan = lambda shape, costs: exchanged(plan(shape, costs))
    message = ""
    try:
        train(engine, chunks)
    except RunError as error:
        message = str(error.problems[0].message)
    with mock.patch.object(megatron, "out_of_order", return_value=[]):
        _, actual = train(engine, chunks)
    return {"problem": message, "different": [name for name in expected if not torch.equal(expected[name], actual[name])]}


def exchanged(schedule: Schedule) -> Schedule:
    """The list with the weight gradients of micro-batches 0 and 2 exchanged on the last rank, behind all of its B."""
    ops = [op for op in schedule.ops[-1] if op.kind != "W"]
    behind = [Op("W", 0, micro_batch) for micro_batch in (2, 1, 0, 3)]
    return replace(schedule, ops=(*schedule.ops[:-1], (*ops, *behind)))


def refused(feature: str) -> list[tuple[str, str]]:
    """The messages and fixes of calls with communication of the caller's own, and of a tensor of another shape."""
    engine = active_feature(feature).engine
    chunks = build(False)
    found = []
    for name in ("p2p_communicator", "adjust_tensor_shapes_fn"):
        with pytest.raises(RunError) as refusal:
            run(partial(engine, **{name: object()}), chunks, 1)
        found.append((str(refusal.value.problems[0].message), refusal.value.problems[0].fix_text))
    if parallel_state.is_pipeline_first_stage():
        shape = PipelineShape(2, 1, MICRO_BATCHES)
        function = partial(forward, None, {})
        stages = MegatronStages(engine, megatron_order(shape), chunks, [batches(1)], chunks[0].config, function, False)
        stages.keywords = {"collect_non_loss_data": False, "first_val_step": None}
        stages.expected = (LENGTH, 2, HIDDEN)
        output = stages.forward(Op("F", 0, 0), None)
        assert output.shape == (LENGTH, 2, HIDDEN)
        stages.expected = (LENGTH + 1, 2, HIDDEN)
        with pytest.raises(RunError) as refusal:
            stages.forward(Op("F", 0, 1), None)
        found.append((str(refusal.value.problems[0].message), refusal.value.problems[0].fix_text))
    return found
