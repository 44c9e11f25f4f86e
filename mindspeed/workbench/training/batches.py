"""Megatron's GPT datasets, the micro-batches of a rank, and a pass of Megatron's schedule over them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from mindspeed.megatron.batches import slice_batch
from mindspeed.workbench.training.data_source import DataSource
from mindspeed.workbench.training.tokenizer import DatasetTokenizer


@dataclass(slots=True)
class Batch:
    """A micro-batch: tensors of [samples, sequence]; all None for a stage that sees neither tokens nor labels.

    ``mask`` is what a feature says of this micro-batch alone; without one, attention is causal.
    """

    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def build_datasets(source: DataSource, seq_length: int, held_out: float, seed: int, cache: Path) -> tuple[Any, Any]:
    """Make an epoch of training and one of held-out samples; collective, the first rank writes their index to ``cache``.

    An index that a rank did not finish is written again: Megatron would read it as it is.
    """
    complete, first = cache / "complete", dist.get_rank() == 0
    if first and not complete.exists():
        shutil.rmtree(cache, ignore_errors=True)
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([source.index.prefix], None),
        split=f"{1 - held_out!r},{held_out!r},0",
        path_to_cache=str(cache),
        tokenizer=DatasetTokenizer(source.tokenizer),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, config).build()
    if first:
        complete.touch()
    return train, valid


class Batches:
    """The micro-batches of this data-parallel rank.

    Sample ``n`` of a run is the same in every layout, and does not depend on how many steps are planned: the first
    epoch has the dataset's order, each later one a permutation of it.
    """

    def __init__(self, dataset: Any, micro_batch_size: int, global_batch_size: int, seed: int) -> None:
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.rank = parallel_state.get_data_parallel_rank()
        self.replicas = parallel_state.get_data_parallel_world_size()
        self.count = global_batch_size // (micro_batch_size * self.replicas)
        self._permutation = lru_cache(maxsize=2)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(len(dataset)))

    def micro_batches(self, first: int, chunk: Any) -> Iterator[Batch]:
        """Yield those of a model chunk in the step whose global batch begins with sample ``first``."""
        stage = unwrap_model(chunk).vp_stage
        ends = (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage)
        own_mask = self.dataset.config.reset_attention_mask  # which every stage reads
        needed = own_mask or any(is_end(ignore_virtual=False, vp_stage=stage) for is_end in ends)
        for number in range(self.count):
            start = first + (number * self.replicas + self.rank) * self.micro_batch_size
            yield self._batch(range(start, start + self.micro_batch_size)) if needed else Batch()

    def _batch(self, samples: range) -> Batch:
        items = [self.dataset[self._position(sample)] for sample in samples]
        names = ("tokens", "labels", "position_ids")
        whole: dict[str, Any] = {name: torch.stack([item[name] for item in items]).cuda(non_blocking=True) for name in names}
        share = slice_batch({**whole, "attention_mask": None})
        return Batch(*(share[name] for name in (*names, "attention_mask")))

    def _position(self, sample: int) -> int:
        epoch, position = divmod(sample, len(self.dataset))
        return int(self._permutation(epoch)[position]) if epoch else position


def run_schedule(chunks: list[Any], batches: Batches, first: int, forward_only: bool = False) -> torch.Tensor | None:
    """Forward, and backward unless ``forward_only``, of the global batch that begins with sample ``first``.

    Returns the mean loss of this rank's micro-batches (a scalar tensor on the device) on the last stage, else None.
    """
    losses = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=[batches.micro_batches(first, chunk) for chunk in chunks],
        model=chunks,
        num_microbatches=batches.count,
        seq_length=batches.dataset.config.sequence_length,
        micro_batch_size=batches.micro_batch_size,
        forward_only=forward_only,
    )
    return torch.stack(losses).mean() if losses else None


def over_ranks(loss: torch.Tensor | None) -> float:
    """Return the loss averaged over the ranks that have one; collective, equal everywhere."""
    values = torch.zeros(2, dtype=torch.float32, device=torch.cuda.current_device())
    if loss is not None:
        values[0], values[1] = loss, 1.0
    dist.all_reduce(values)
    total, ranks = values.tolist()
    return float(total / ranks)


def largest(*values: float) -> list[float]:
    """Return each value of the rank where it is largest; collective, equal everywhere."""
    tensor = torch.tensor(values, dtype=torch.float32, device=torch.cuda.current_device())  # HCCL reduces no float64
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(value) for value in tensor.tolist()]


def _forward(batches: Iterator[Batch], chunk: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    return chunk(batch.tokens, batch.positions, batch.mask, labels=batch.labels), _loss


def _loss(losses_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum and number of this rank's tokens, which Megatron divides, and this rank's mean."""
    losses = losses_BS.float()
    return losses.sum(), torch.tensor(losses.numel(), dtype=torch.int, device=losses.device), losses.detach().mean()
