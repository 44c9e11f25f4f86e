"""Evaluate a model: its loss on held-out text, the entropy to beat, and generated text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from mindspeed.megatron.batches import slice_batch
from mindspeed.workbench.training.batches import Batches, over_ranks, run_schedule
from mindspeed.workbench.training.data_source import DataSource

_COUNTED: Final = 1 << 26
"""Tokens of the held-out part that the entropy is counted over, at most."""


def unigram_entropy(source: DataSource, held_out: float) -> float:
    """Entropy in nats of the frequencies of single tokens in the held-out part: what a model without context can reach."""
    first, last = source.held_out_from(held_out), len(source.index.lengths)
    counts = np.bincount(source.index.read(first, last)[:_COUNTED].astype(np.int64))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def held_out_loss(chunks: list[Any], batches: Batches, steps: int, stops: Callable[[], bool]) -> float | None:
    """Mean loss in nats per token over up to ``steps`` global batches of held-out samples; collective.

    ``stops`` is asked before each batch, equally on every rank; None when it says so.
    """
    per_step = batches.count * batches.micro_batch_size * batches.replicas
    steps = max(1, min(steps, len(batches.dataset) // per_step))
    losses = []
    with evaluating(chunks):
        for step in range(steps):
            if stops():
                return None
            losses.append(over_ranks(run_schedule(chunks, batches, step * per_step, forward_only=True)))
    return sum(losses) / len(losses)


def generate(
    chunks: list[Any], prompt: list[int], count: int, seq_length: int, top_k: int, vocab_size: int, stops: Callable[[], bool]
) -> list[int]:
    """Continue ``prompt`` by ``count`` tokens, each drawn from the ``top_k`` likeliest; collective, equal on every rank.

    The whole text goes through the model for every token, in any layout. Only the last ``seq_length`` tokens are seen.
    The text ends early when ``stops`` says so, as in `held_out_loss`.
    """
    ids = list(prompt)
    generator = torch.Generator("cpu").manual_seed(0)
    with evaluating(chunks):
        for _ in range(count):
            if stops():
                break
            seen = ids[-seq_length:]
            logits = _logits(chunks, seen, seq_length)
            chosen = torch.zeros(1, dtype=torch.int64, device=torch.cuda.current_device())
            if logits is not None:
                best = logits[:vocab_size].float().topk(min(top_k, vocab_size))
                drawn = torch.multinomial(best.values.softmax(-1).cpu(), 1, generator=generator)
                chosen[0] = best.indices[int(drawn)]
            pipeline = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(chosen, parallel_state.get_pipeline_model_parallel_last_rank(), pipeline)
            ids.append(int(chosen))
    return ids[len(prompt) :]


@contextmanager
def evaluating(chunks: list[Any]) -> Iterator[None]:
    """Evaluation mode without gradients, with weights that were gathered if their gathering overlaps with training."""
    with torch.no_grad(), gathered(chunks):
        for chunk in chunks:
            chunk.eval()
        yield
        for chunk in chunks:
            chunk.train()


@contextmanager
def gathered(chunks: list[Any]) -> Iterator[None]:
    """Complete weights on every rank, also where a feature gathers them during the next forward pass."""
    overlapping = [chunk for chunk in chunks if chunk.ddp_config.overlap_param_gather]
    for chunk in overlapping:
        chunk.disable_forward_pre_hook()
    yield
    for chunk in overlapping:
        chunk.enable_forward_pre_hook()


def _logits(chunks: list[Any], ids: list[int], seq_length: int) -> torch.Tensor | None:
    """Logits of the token after ``ids`` on the last stage, [vocabulary]; None elsewhere."""
    padded = torch.tensor(ids + [0] * (seq_length - len(ids)), device=torch.cuda.current_device())[None]
    positions = torch.arange(seq_length, device=torch.cuda.current_device())[None]
    share = slice_batch({"tokens": padded, "position_ids": positions, "attention_mask": None})
    last = partial(_last, share["position_ids"][0] == len(ids) - 1)

    def forward(_: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        return chunk(share["tokens"], share["position_ids"], share["attention_mask"]), last

    outputs = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[None] * len(chunks),
        model=chunks,
        num_microbatches=parallel_state.get_pipeline_model_parallel_world_size(),
        seq_length=seq_length,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return outputs[0] if outputs else None


def _last(chosen_S: torch.Tensor, logits_BSV: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
    """Logits of the chosen position, which one rank of the context-parallel group has."""
    logits_V: torch.Tensor = gather_from_tensor_model_parallel_region(logits_BSV[:, chosen_S].sum(1))[0]
    dist.all_reduce(logits_V, group=parallel_state.get_context_parallel_group())
    return logits_V
