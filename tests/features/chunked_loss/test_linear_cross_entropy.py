"""The library against the definition on all logits, and against Megatron's loss on ranks."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import mindspeed
from mindspeed.features.chunked_loss.linear_cross_entropy import Mode, linear_cross_entropy, token_log_probabilities
from mindspeed.memory.meter import Meter
from mindspeed.ops import native_library
from mindspeed.workbench.verification.pool import WorkerPool
from tests.features.chunked_loss.ranks import MODES, beside_all_logits, beside_megatron, largest_differences
from tests.features.chunked_loss.reference import cross_entropy, log_probabilities

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2}


def inputs(tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    parts = [torch.randn(size, width, generator=generator).to(dtype).requires_grad_() for size in (tokens, vocabulary)]
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    return parts, labels, torch.randn(tokens, generator=generator).to(torch.promote_types(dtype, torch.float32))


def with_gradients(loss: Tensor, parts: list[Tensor], gradient: Tensor) -> list[Tensor]:
    return [loss.detach(), *(tensor.double() for tensor in torch.autograd.grad(loss, parts, gradient))]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.1, 1e-3)])
@pytest.mark.parametrize(
    ("tokens", "width", "vocabulary", "chunks"), [(7, 16, 33, 3), (8, 16, 33, 1), (5, 8, 20, 9), (37, 24, 101, 5)]
)
def test_loss_and_gradients_are_those_of_all_logits(
    dtype: torch.dtype, mode: Mode, smoothing: float, z_loss: float, tokens: int, width: int, vocabulary: int, chunks: int
) -> None:
    parts, labels, gradient = inputs(tokens, width, vocabulary, dtype)
    labels[1] = -100
    loss = linear_cross_entropy(
        *parts, labels, chunks=chunks, mode=mode, label_smoothing=smoothing, z_loss=z_loss, token_weights=3 * gradient
    )
    expected = with_gradients(cross_entropy(*parts, labels, smoothing, z_loss), parts, gradient)
    assert max(largest_differences(with_gradients(loss, parts, gradient), expected)) <= TOLERANCE[dtype]
    assert loss[1] == 0


def test_predicted_tokens_are_those_of_all_logits() -> None:
    parts, labels, _ = inputs(40, 8, 5, torch.float32)
    labels[3] = -100
    is_largest = torch.empty_like(labels, dtype=torch.bool)
    linear_cross_entropy(*parts, labels, chunks=3, is_largest=is_largest)
    expected = (parts[0] @ parts[1].t()).argmax(1) == labels
    assert is_largest.equal(expected)
    assert 0 < expected.sum() < len(labels)


@pytest.mark.parametrize("mode", MODES)
def test_no_token_and_no_label_give_gradients_of_zero(mode: Mode) -> None:
    for tokens in (0, 6):
        parts, labels, gradient = inputs(tokens, 4, 9, torch.float32)
        labels.fill_(-100)
        loss = linear_cross_entropy(*parts, labels, chunks=2, mode=mode)
        assert [float(tensor.abs().sum()) for tensor in with_gradients(loss, parts, gradient)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_weights_without_gradient_stay_without(mode: Mode) -> None:
    parts, labels, gradient = inputs(6, 4, 9, torch.float32)
    for frozen in range(2):
        given = [part.detach().requires_grad_(at != frozen) for at, part in enumerate(parts)]
        (found,) = torch.autograd.grad(linear_cross_entropy(*given, labels, chunks=2, mode=mode), given[1 - frozen], gradient)
        (expected,) = torch.autograd.grad(cross_entropy(*given, labels), given[1 - frozen], gradient)
        assert torch.allclose(found, expected, atol=1e-6)


def test_accumulated_gradients_of_another_loss_are_computed_again_with_a_warning() -> None:
    parts, labels, gradient = inputs(9, 4, 11, torch.float64)
    loss = linear_cross_entropy(*parts, labels, chunks=2, mode="accumulate")
    with pytest.warns(UserWarning, match="the gradients of token losses are no multiple of token_weights"):
        found = with_gradients(loss, parts, gradient)
    assert max(largest_differences(found, with_gradients(cross_entropy(*parts, labels), parts, gradient))) < 1e-12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = linear_cross_entropy(*parts, labels, chunks=2, mode="accumulate")
        torch.autograd.grad(loss, parts, torch.full_like(gradient, 0.125))


@pytest.mark.parametrize("with_entropy", [True, False])
def test_log_probabilities_and_entropy_have_the_shapes_and_values_of_verl(with_entropy: bool) -> None:
    """A response of verl: hidden states [batch, response, H], labels [batch, response]; loss by ratios and entropy."""
    parts, labels, _ = inputs(10, 8, 19, torch.float64)
    hidden, weight = parts[0].view(2, 5, 8), parts[1]
    labels = labels.view(2, 5)
    log, entropy = token_log_probabilities(hidden, weight, labels, chunks=3, temperature=0.7, with_entropy=with_entropy)
    expected_log, expected_entropy = log_probabilities(hidden, weight, labels, 0.7)
    assert log.shape == (2, 5)
    ratios, expected_ratios = ((value - expected_log.detach() - 0.1).exp() for value in (log, expected_log))
    loss, expected = ratios.sum(), expected_ratios.sum()
    if with_entropy:
        assert entropy is not None
        assert entropy.shape == (2, 5)
        loss, expected = loss - 0.01 * entropy.sum(), expected - 0.01 * expected_entropy.sum()
    else:
        assert entropy is None
    one = torch.ones((), dtype=torch.float64)
    assert max(largest_differences(with_gradients(loss, parts, one), with_gradients(expected, parts, one))) < 1e-12


def test_sequences_packed_as_in_slime_give_one_value_for_each_token() -> None:
    """Rollouts of slime are packed: hidden states [tokens, 1, H] of all sequences one behind another."""
    parts, labels, _ = inputs(10, 8, 19, torch.float32)
    log, _ = token_log_probabilities(parts[0][:, None], parts[1], labels[:, None], chunks=4)
    assert log.shape == (10, 1)
    assert torch.allclose(log[:, 0], log_probabilities(*parts, labels, 1.0)[0], atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_of_logits_is_that_of_one_chunk(mode: Mode, chunks: int, dtype: torch.dtype) -> None:
    """The reference also has three fp32 numbers of an eighth of the logits."""
    tokens, width, vocabulary = 64, 8, 4096
    parts, labels, _ = inputs(tokens, width, vocabulary, dtype)
    with Meter() as meter:
        linear_cross_entropy(*parts, labels, chunks=chunks, mode=mode).sum().backward()
    gradients = sum(part.numel() for part in parts) * dtype.itemsize
    sums = vocabulary * width * (0 if dtype is torch.float32 else 4)
    vectors = tokens * 128
    peak = meter.peak.host - gradients - sums - vectors
    bytes_of_logit = dtype.itemsize + (0 if native_library.loaded() else 3 * 4 / min(8, tokens // chunks))
    assert peak <= tokens * vocabulary * bytes_of_logit / chunks


def test_sizes_that_do_not_fit_are_refused() -> None:
    parts, labels, _ = inputs(6, 4, 9, torch.float32)
    with pytest.raises(ValueError, match=r"hidden states \(6, 4\), weight \(9, 4\) and labels \(5,\) do not fit together"):
        linear_cross_entropy(*parts, labels[:5])
    with pytest.raises(ValueError, match="chunks is 0, but it must be at least 1"):
        linear_cross_entropy(*parts, labels, chunks=0)


def on_ranks(pool: WorkerPool, job: Any, ranks: int, sequence_parallel: bool) -> list[dict[str, float]]:
    plan = mindspeed.plan(platform="cpu", world={"world_size": ranks, "tp": ranks})
    return list(pool.call(job, ranks, ranks, sequence_parallel, plan=plan))


LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]


@pytest.mark.parametrize(
    ("ranks", "sequence_parallel"),
    [pytest.param(*layout, marks=[] if layout == (2, True) else pytest.mark.long) for layout in LAYOUTS],
)
def test_ranks_of_the_vocabulary_have_the_loss_and_gradients_of_megatron(
    pool: WorkerPool, ranks: int, sequence_parallel: bool
) -> None:
    for found in on_ranks(pool, beside_megatron, ranks, sequence_parallel):
        assert len(found) == 4
        for case, difference in found.items():
            assert difference <= (1e-6 if "float32" in case else 1e-2), case


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.long), True])
def test_ranks_of_the_vocabulary_have_smoothing_and_entropy_of_the_whole(pool: WorkerPool, sequence_parallel: bool) -> None:
    for found in on_ranks(pool, beside_all_logits, 2, sequence_parallel):
        assert len(found) == 2
        assert max(found.values()) < 1e-11
