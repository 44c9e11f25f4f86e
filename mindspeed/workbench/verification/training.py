"""Run one rank of a training run: the recipe's batches through Megatron's own schedule, recorded on the way."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from inspect import getfile
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.datasets import gpt_dataset
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, unwrap_model

from mindspeed.engine.runtime import session
from mindspeed.megatron.batches import slice_batch
from mindspeed.megatron.gpt import connect
from mindspeed.megatron.hook_wrappers import group_sizes
from mindspeed.megatron.training_hook_wrappers import LoopState, step_metrics
from mindspeed.memory.byte_count import Bytes
from mindspeed.memory.meter import Meter
from mindspeed.memory.optimizer_windows import resting_bytes, whole_tensors
from mindspeed.memory.step_memory import StepMemory
from mindspeed.platforms import backend_rules, runtime
from mindspeed.platforms.host_reads import host_reads
from mindspeed.workbench.verification.model import build_chunks, build_optimizer
from mindspeed.workbench.verification.placement import pieces_of, placed_parameters
from mindspeed.workbench.verification.record import RankResult, RoutingChoice, TensorShard
from mindspeed.workbench.verification.routing import RoutingRecord, merge
from mindspeed.workbench.verification.shape import Recipe

DOCUMENTS: Final = 0.2
"""Share of tokens that end a document: in 24 tokens about five, some of one token, some longer than a rank's share."""


_PASS: Final = "forward pass"
_SETTLED: Final = 0.05
"""Seconds after which the threads of gloo have let go of the tensors of a collective that has ended."""
_MEASURING: Final = (str(Path(__file__).parent), getfile(Meter))
"""Code that reads values for the record of a run."""


@dataclass(slots=True)
class MicroBatch:
    """A micro-batch: its number in the global batch, and the inputs of a GPT model. Tokens are [samples, sequence].

    ``rows`` are the places in the sequence that this rank has tokens of. ``embedded`` is set once the decoder has its input,
    for layers of multi-token prediction embed their tokens once more.
    """

    number: int
    rows: list[int]
    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None
    embedded: bool = False


def train(recipe: Recipe, choices: Sequence[RoutingChoice] = ()) -> RankResult:
    """Train on the groups that exist and record losses, gradients of step 1, final weights, and the effects of features.

    Routers repeat the ``choices`` of another run where the recipe says so.
    """
    torch.manual_seed(recipe.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(recipe.seed, force_reset_rng=True)
    record = RankResult()
    run = _Run(recipe, record)
    run.watch(choices)
    run.train()
    record.communicators = list(backend_rules.created)
    active = session.current()
    record.reached = active.proof.effects() if active is not None else {}
    return record


def measure(recipe: Recipe) -> tuple[int, int]:
    """Return the device bytes that a micro-batch keeps for backward, and those at the peak of the second step."""
    torch.manual_seed(recipe.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(recipe.seed, force_reset_rng=True)
    run = _Run(recipe, RankResult())
    memory = StepMemory(run.chunks)
    memory.optimizer = run.optimizer
    with memory.watched():
        run.forward_backward(0)
    run.optimizer.step()
    with memory.watched():
        run.forward_backward(1)
    return run.kept.total.device, memory.ended_step() or 0


def micro_batches(recipe: Recipe, step: int, rank: int, size: int) -> Iterator[MicroBatch]:
    """The micro-batches of data-parallel ``rank`` of ``size``; every layout draws them from the same global batch."""
    shape = recipe.shape
    generator = torch.Generator("cpu").manual_seed(recipe.seed + step)
    samples = torch.randint(shape.vocab_size, (recipe.global_batch_size, shape.seq_length + 1), generator=generator)
    if recipe.documents:
        samples[torch.rand(samples.shape, generator=generator) < DOCUMENTS] = shape.vocab_size - 1
    for number in range(rank, recipe.global_batch_size // recipe.micro_batch_size, size):
        part = samples[number * recipe.micro_batch_size : (number + 1) * recipe.micro_batch_size]
        part = part[:, : recipe.length_of(number) + 1]
        tokens = part[:, :-1].contiguous()
        rows = torch.arange(tokens.shape[1])[None]
        mask, positions = _masks(recipe, tokens)
        whole = {"tokens": tokens, "labels": part[:, 1:].contiguous(), "position_ids": positions, "attention_mask": mask}
        share = slice_batch({name: x if x is None else x.cuda() for name, x in (*whole.items(), ("rows", rows))})
        yield MicroBatch(number, share["rows"][0].tolist(), *(share[name] for name in whole))


def _masks(recipe: Recipe, tokens_BS: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Attention mask and position ids, with documents as Megatron's data sets make them."""
    length = tokens_BS.shape[1]
    if not recipe.documents:
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        return mask, torch.arange(length).expand(recipe.micro_batch_size, -1)
    end = recipe.shape.vocab_size - 1
    made = [gpt_dataset._get_ltor_masks_and_position_ids(row, end, recipe.restart, True, False, True) for row in tokens_BS]
    masks, _, positions = zip(*made, strict=True)
    return None if masks[0] is None else torch.stack(masks), torch.stack(positions)


class KeptBytes:
    """Bytes that forward passes leave behind for backward, by a meter of each pass.

    A pass is measured from its beginning to `end`, so that what is moved or freed right behind it counts as moved or freed.
    """

    def __init__(self) -> None:
        self.total = Bytes()
        self._meter: Meter | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Surround a forward pass."""
        meter = self._meter = Meter()
        meter.__enter__()
        with meter.owner(_PASS):
            yield

    def end(self) -> None:
        """Add what the last pass has left."""
        meter, self._meter = self._meter, None
        if meter is not None:
            if dist.get_world_size() > 1:
                time.sleep(_SETTLED)
            gc.collect(1)  # what this pass has left in cycles of references
            self.total += meter.by_owner().get(_PASS, Bytes())
            meter.__exit__(None, None, None)


class _Run:
    def __init__(self, recipe: Recipe, record: RankResult) -> None:
        if (active := session.current()) is not None:
            active.proof.say = None
        self.recipe = recipe
        self.record = record
        self.chunks = build_chunks(recipe)
        self.optimizer = build_optimizer(self.chunks, recipe.adam)
        self.config = self.chunks[0].config
        self.ddp_config = self.chunks[0].ddp_config
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_size = parallel_state.get_data_parallel_world_size()
        self.kept = KeptBytes()
        record.sizes = group_sizes() | {"vpp": len(self.chunks)}
        record.settings = _settings(self.config, self.ddp_config, self.optimizer.config)
        connect(self.chunks)

    def train(self) -> None:
        state = LoopState(self.chunks, self.optimizer, None)
        for step in range(self.recipe.steps):
            with session.around("around_train_step", state=state):
                self.train_step(step)
            state.step += 1
            metrics = step_metrics(state)
            if dist.get_rank() == 0:
                session.call("log_metrics", step=state.step, metrics=metrics)
        self.record_weights()

    def train_step(self, step: int) -> None:
        reads_matter = step == 0 and backend_rules.ACTIVE is not None
        with runtime.traffic() as moved, host_reads() if reads_matter else nullcontext(()) as reads:
            self.forward_backward(step)
        self.record.host_reads |= Counter(str(read) for read in reads if not read.file.startswith(_MEASURING))
        if step == 0:
            self.record_gradients()
            self.record.activations = self.kept.total
        with runtime.traffic() as gathered:
            self.optimizer.step()
        for (kind, _), count in (*moved.items(), *gathered.items()):
            self.record.traffic[kind] = self.record.traffic.get(kind, 0) + count.bytes

    def forward_backward(self, step: int) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [micro_batches(self.recipe, step, self.data_rank, self.data_size) for _ in self.chunks]
        try:
            losses = get_forward_backward_func()(
                forward_step_func=partial(self._forward, step),
                data_iterator=batches,
                model=self.chunks,
                num_microbatches=self.recipe.global_batch_size // (self.recipe.micro_batch_size * self.data_size),
                seq_length=self.recipe.shape.seq_length,
                micro_batch_size=self.recipe.micro_batch_size,
                forward_only=False,
            )
        finally:
            self.kept.end()
        for number, loss in losses:
            self.record.losses[step, number] = float(loss)

    def _forward(self, step: int, batches: Iterator[MicroBatch], chunk: Any) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        self.batch, self.step = batch, step
        self.kept.end()
        first = step == 0 and batch.number == self.data_rank
        with self.kept.forward() if first else nullcontext():
            output = chunk(batch.tokens, batch.positions, batch.mask, labels=batch.labels)
        if get_attr_wrapped_model(chunk, "post_process"):
            self.kept.end()  # backward follows at once
        return output, partial(_loss, batch.number)

    def watch(self, choices: Sequence[RoutingChoice]) -> None:
        """Keep the gradient of what the embedding gives the decoder, in the first step, and repeat routing where it must."""
        if self.recipe.repeats_routing:
            replayed = merge(choices, self.recipe.shape.seq_length)
            RoutingRecord(replayed, self._routed, self.record.choices).watch(unwrap_model(self.chunks))
        for chunk in self.chunks:
            if get_attr_wrapped_model(chunk, "pre_process"):
                unwrap_model(chunk).embedding.register_forward_hook(self._embedded)

    def _embedded(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if self.step == 0 and output.requires_grad and not self.batch.embedded:
            self.batch.embedded = True
            output.register_hook(partial(self._record_input_gradient, self.batch))  # type: ignore[no-untyped-call]

    def _record_input_gradient(self, batch: MicroBatch, gradient_SBH: torch.Tensor) -> None:
        shape = self.recipe.shape
        rows = _local_rows(batch, gradient_SBH.shape[0])
        samples = slice(batch.number * self.recipe.micro_batch_size, (batch.number + 1) * self.recipe.micro_batch_size)
        # Megatron averages over ranks, or over tokens, when it reduces parameter gradients: later.
        per_token = self.config.calculate_per_token_loss
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        parts = shape.seq_length * self.recipe.global_batch_size if per_token else ranks
        values = gradient_SBH.detach().to("cpu", torch.float32) / parts
        full = (shape.seq_length, self.recipe.global_batch_size, shape.hidden_size)
        piece = partial(TensorShard, "input gradient", "decoder input", full)
        self.record.pieces.append(piece((rows, samples), values.numpy()))
        if beyond := list(range(self.recipe.length_of(batch.number), shape.seq_length)):
            zeros = values.new_zeros(len(beyond), *values.shape[1:])
            self.record.pieces.append(piece((beyond, samples), zeros.numpy()))

    def _routed(self, length: int) -> tuple[int, int, list[int]]:
        """Step, micro-batch and the rows that this rank has, where a router sees ``length`` of them or all."""
        ranks = parallel_state.get_tensor_model_parallel_world_size() if self.config.sequence_parallel else 1
        return self.step, self.batch.number, _local_rows(self.batch, max(length, len(self.batch.rows) // ranks))

    def record_gradients(self) -> None:
        for chunk in self.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                if self.ddp_config.use_distributed_optimizer:
                    _gather_buffer(buffer)
        for placed in placed_parameters(self.chunks):
            self.record.pieces += pieces_of("gradient", placed, placed.main_grad)

    def record_weights(self) -> None:
        if self.ddp_config.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        for placed in placed_parameters(self.chunks):
            self.record.pieces += pieces_of("weight", placed, placed.parameter)
        if self.recipe.adam:
            self.record_optimizer()

    def record_optimizer(self) -> None:
        """Record main weights and states of this rank; both runs have the same layout."""
        self.record.optimizer = resting_bytes(self.optimizer)
        for name, tensor in whole_tensors(self.optimizer):
            values = tensor.to("cpu", torch.float32).numpy()
            piece = TensorShard("optimizer state", f"{name} on rank {dist.get_rank()}", values.shape, ..., values)
            self.record.pieces.append(piece)


def _local_rows(batch: MicroBatch, length: int) -> list[int]:
    """The rows of a batch of which a layer has ``length``: all, or this tensor-parallel rank's share."""
    first = parallel_state.get_tensor_model_parallel_rank() * length if len(batch.rows) > length else 0
    return batch.rows[first : first + length]


def _loss(number: int, losses_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[int, torch.Tensor]]:
    """Sum and number of tokens for Megatron to divide, and for the record the mean over the whole sequence."""
    total, count = losses_BS.float().sum(), torch.tensor(losses_BS.numel(), dtype=torch.int, device=losses_BS.device)
    means = torch.stack([total.detach(), count.float()])
    dist.all_reduce(means, group=parallel_state.get_context_parallel_group())
    return total, count, (number, means[0] / means[1])


def _settings(*configs: Any) -> dict[str, str]:
    """``{"TransformerConfig.hidden_size": "32", ...}`` of every field; values as text, for they only are compared."""
    return {f"{type(config).__name__}.{f.name}": str(getattr(config, f.name)) for config in configs for f in fields(config)}


def _gather_buffer(buffer: Any) -> None:
    """Collect the reduced shares of a gradient buffer of the distributed optimizer on every rank, in place."""
    group = buffer.data_parallel_group
    for bucket in buffer.buckets:
        shares = list(bucket.grad_data.chunk(group.size()))
        dist.all_gather(shares, shares[group.rank()].clone(), group=group)
