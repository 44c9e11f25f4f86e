"""What a rank of the tests computes: the chunked loss beside Megatron's, and beside all logits."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from torch import Tensor

from mindspeed.features.chunked_loss.linear_cross_entropy import Mode, linear_cross_entropy, token_log_probabilities
from mindspeed.memory.meter import Meter
from tests.features.chunked_loss.reference import cross_entropy, log_probabilities

MODES: tuple[Mode, ...] = ("recompute", "accumulate")
SEQUENCE, BATCH, HIDDEN, VOCABULARY = 12, 3, 16, 40
TOKENS, WIDTH, ROWS = 512, 64, 4096
"""Sizes of the measured loss, with which vectors are small."""


def largest_differences(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """The largest difference of each tensor, relative to the largest value."""
    pairs = zip(found, expected, strict=True)
    return [float(((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()) for a, b in pairs]


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(VOCABULARY, (SEQUENCE, BATCH), generator=generator)
    gradient = (torch.rand(SEQUENCE, BATCH, generator=generator) > 0.3) / 17
    return hidden, weight, labels, gradient


def beside_megatron(ranks: int, sequence_parallel: bool) -> dict[str, float]:
    """Return the largest difference of loss and gradients from Megatron's loss over the same ranks, for modes and types."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        expected = _with_gradients(ranks, sequence_parallel, dtype, None)
        for mode in MODES:
            differences = largest_differences(_with_gradients(ranks, sequence_parallel, dtype, mode), expected)
            found[f"{mode} {dtype}"] = max(differences)
    return found


def _with_gradients(ranks: int, sequence_parallel: bool, dtype: torch.dtype, mode: Mode | None) -> list[Tensor]:
    """Loss and gradients of hidden states and weight, by Megatron without a mode."""
    group = parallel_state.get_tensor_model_parallel_group()
    hidden, weight, labels, gradient = _inputs(dtype)
    if sequence_parallel:
        hidden = hidden.chunk(ranks)[group.rank()]
    hidden, weight = hidden.clone().requires_grad_(), weight.chunk(ranks)[group.rank()].clone().requires_grad_()
    if mode is None:
        logits = linear_with_grad_accumulation_and_async_allreduce(
            hidden, weight, None, False, ranks > 1 and not sequence_parallel, sequence_parallel, tp_group=group
        )
        loss = vocab_parallel_cross_entropy(logits, labels)
    else:
        loss = linear_cross_entropy(
            hidden,
            weight,
            labels,
            group=group,
            sequence_parallel=sequence_parallel,
            chunks=5,
            mode=mode,
            token_weights=(gradient > 0).float(),
        )
    return [loss.detach(), *(tensor.float() for tensor in torch.autograd.grad(loss, [hidden, weight], gradient))]


def beside_all_logits(ranks: int, sequence_parallel: bool) -> dict[str, float]:
    """Return the largest difference of smoothed loss, log-probabilities, entropy and gradients from all logits, for modes."""
    return {mode: max(_from_all_logits(ranks, sequence_parallel, mode)) for mode in MODES}


def _from_all_logits(ranks: int, sequence_parallel: bool, mode: Mode) -> list[float]:
    group = parallel_state.get_tensor_model_parallel_group()
    hidden, weight, labels, _ = _inputs(torch.float64)
    labels[2] = -100
    gradient = torch.randn(labels.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    parts = [
        (hidden.chunk(ranks)[group.rank()] if sequence_parallel else hidden).clone().requires_grad_(),
        weight.chunk(ranks)[group.rank()].clone().requires_grad_(),
    ]
    over = {"group": group, "sequence_parallel": sequence_parallel, "chunks": 5}
    loss = linear_cross_entropy(*parts, labels, mode=mode, label_smoothing=0.1, z_loss=1e-2, token_weights=gradient, **over)
    log, entropy = token_log_probabilities(*parts, labels, temperature=0.7, with_entropy=True, **over)
    assert entropy is not None
    found: list[Tensor] = []
    expected: list[Tensor] = []
    references = (cross_entropy(*whole, labels, 0.1, 1e-2), *log_probabilities(*whole, labels, 0.7))
    for result, reference in zip((loss, log, entropy), references, strict=True):
        own_hidden, own_weight = torch.autograd.grad(result, parts, gradient, retain_graph=True)
        all_hidden, all_weight = torch.autograd.grad(reference, whole, gradient, retain_graph=True)
        found += [result.detach(), own_hidden, own_weight]
        part = all_hidden.chunk(ranks)[group.rank()] if sequence_parallel else all_hidden
        expected += [reference.detach(), part, all_weight.chunk(ranks)[group.rank()]]
    return largest_differences(found, expected)


class PromptMeter(Meter):
    """A meter that counts a tensor at once, also one that is freed before the next operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.lap()
        return result


def measured_bytes(ranks: int, sequence_parallel: bool) -> dict[tuple[str, str, int], int]:
    """Return the most bytes that the loss and its backward pass have at a time, for modes, types and numbers of chunks.

    With more chunks, in fp32, a copy would be the most that gloo's reduce-scatter makes. A thread of gloo frees the tensors of
    a transfer some time after it has ended, so the least of several passes counts.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    cases = [(mode, dtype, chunks) for mode in MODES for dtype in types for chunks in (1, 16)]
    return {
        (mode, dtype, chunks): min(peak_of_loss(mode, types[dtype], chunks, ranks, group) for _ in range(5))
        for mode, dtype, chunks in cases
    }


def peak_of_loss(mode: Mode, dtype: torch.dtype, chunks: int, ranks: int = 1, group: dist.ProcessGroup | None = None) -> int:
    """Return the most bytes that the loss and its backward pass have at a time, under sequence parallelism with ranks."""
    hidden = torch.randn(TOKENS // ranks, 1, WIDTH).to(dtype).requires_grad_()
    weight = torch.randn(ROWS // ranks, WIDTH).to(dtype).requires_grad_()
    labels = torch.randint(ROWS, (TOKENS, 1), generator=torch.Generator().manual_seed(7))
    with PromptMeter() as meter:
        loss = linear_cross_entropy(
            hidden, weight, labels, group=group, sequence_parallel=ranks > 1, chunks=chunks, mode=mode, ignore_index=None
        )
        loss.sum().backward()
    return meter.peak.device + meter.peak.host
