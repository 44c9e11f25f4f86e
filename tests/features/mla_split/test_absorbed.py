"""Attention to latent vectors beside attention to the keys and values of heads, and beside Megatron's functions."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed.features.mla_split import absorbed
from mindspeed.features.mla_split.absorbed import Absorption, Target, divergence, sparse_attention
from mindspeed.features.mla_split.projections import HeadWidths
from mindspeed.memory.meter import Meter

WIDTHS = HeadWidths(heads=3, key=5, rope=2, value=4)
RANK, SCALE = 6, 0.3
ATTENDS = Absorption(WIDTHS.key, SCALE)


def inputs(tokens: int, count: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """Return queries, latent keys and the weight, and the selected keys of each query, as an indexer chooses them."""
    made = torch.Generator().manual_seed(0)
    width = WIDTHS.key + WIDTHS.rope
    shapes = [(tokens, batch, WIDTHS.heads, width), (tokens, batch, RANK + WIDTHS.rope), (WIDTHS.heads * 9, RANK)]
    given = [torch.randn(shape, generator=made, dtype=dtype).requires_grad_() for shape in shapes]
    scores = torch.randn(batch, tokens, tokens, generator=made) + torch.full((tokens, tokens), -torch.inf).triu(1)
    return given, scores.topk(min(count, tokens), dim=-1)[1]


def of_heads(query: Tensor, keys: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of heads, as Megatron makes them."""
    made = (keys[..., :RANK] @ weight.t()).unflatten(-1, (WIDTHS.heads, -1))
    key, value = made.split([WIDTHS.key, WIDTHS.value], dim=-1)
    return query, torch.cat([key, keys[..., None, RANK:].expand(*key.shape[:-1], -1)], dim=-1), value


def dense(query: Tensor, keys: Tensor, weight: Tensor, selected: Tensor) -> tuple[Tensor, dict[Target, Tensor | None]]:
    """Return the output and the targets of attention that masks the scores of all keys of all heads."""
    query, key, value = of_heads(query, keys, weight)
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) * SCALE
    future = torch.full(scores.shape[-2:], -torch.inf).triu(1)
    chosen = torch.full_like(scores[:, 0], -torch.inf).scatter_(-1, selected, 0).unsqueeze(1)
    every, found = ((scores + mask).softmax(-1) for mask in (future, future + chosen))
    output = torch.einsum("bhst,tbhv->sbhv", found, value).flatten(2)
    return output, {"none": None, "selected": found.sum(1).gather(-1, selected), "all": every.sum(1)}


@pytest.mark.parametrize(("tokens", "count"), [(1, 3), (7, 100), (16, 1), (15, 3)])
@pytest.mark.parametrize("block", [2**24, 400, 1])
@pytest.mark.parametrize("gather", [0, 2])
def test_every_form_has_the_results_of_keys_and_values_of_heads(
    monkeypatch: pytest.MonkeyPatch, tokens: int, count: int, block: int, gather: int
) -> None:
    monkeypatch.setattr(absorbed, "BLOCK", block)
    monkeypatch.setattr(absorbed, "GATHER", gather)
    given, selected = inputs(tokens, count)
    wanted, targets = dense(*given, selected)
    chosen = torch.randn_like(wanted)
    expected = torch.autograd.grad(wanted, given, chosen)
    for kind, target in targets.items():
        output, found = sparse_attention(*given, selected, replace(ATTENDS, target=kind))
        torch.testing.assert_close((output, found), (wanted, target))
        torch.testing.assert_close(torch.autograd.grad(output, given, chosen), expected)


def test_a_frozen_weight_gets_no_gradient() -> None:
    given, selected = inputs(7, 3)
    given[2].requires_grad_(False)
    output, _ = sparse_attention(*given, selected, replace(ATTENDS, hand_over=pytest.fail))
    expected = torch.autograd.grad(dense(*given, selected)[0].sum(), given[:2])
    torch.testing.assert_close(torch.autograd.grad(output.sum(), given[:2]), expected)


def test_the_gradient_of_the_weight_can_go_elsewhere() -> None:
    given, selected = inputs(7, 3)
    taken: list[Tensor] = []
    output, _ = sparse_attention(*given, selected, replace(ATTENDS, hand_over=taken.append))
    output.sum().backward()
    (expected,) = torch.autograd.grad(dense(*given, selected)[0].sum(), given[2])
    assert given[2].grad is None
    torch.testing.assert_close(taken, [expected])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("sparse", [False, True])
def test_output_and_loss_are_those_of_megatron(dtype: torch.dtype, tolerance: float, sparse: bool) -> None:
    from megatron.core.transformer.experimental_attention_variant import dsa

    given, selected = inputs(16, 4, dtype=dtype)
    index_scores = torch.randn(2, 16, 16) + torch.full((16, 16), -torch.inf).triu(1)
    one = index_scores.clone().requires_grad_()
    query, key, value = of_heads(*given)
    wanted = dsa.unfused_dsa_fn(query, key, value, selected, SCALE)
    groups: Any = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    expected = dsa.compute_dsa_indexer_loss(one * 1, selected, query.detach(), key.detach(), SCALE, 0.5, sparse, groups)
    other = index_scores.clone().requires_grad_()
    output, target = sparse_attention(*given, selected, replace(ATTENDS, target="selected" if sparse else "all"))
    assert target is not None
    loss = 0.5 * divergence(other.gather(-1, selected) if sparse else other, target)
    near = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close((output, loss), (wanted, expected), **near)
    chosen = torch.randn_like(wanted)
    found = [*torch.autograd.grad(output, given, chosen), *torch.autograd.grad(loss, other)]
    gradients = [*torch.autograd.grad(wanted, given, chosen), *torch.autograd.grad(expected, one)]
    for mine, megatrons in zip(found, gradients, strict=True):
        assert float((mine - megatrons).abs().max()) <= tolerance * float(megatrons.abs().max())


@pytest.mark.usefixtures("on_cpu")
def test_memory_beside_inputs_and_results_is_bounded_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absorbed, "BLOCK", 2**12)
    extra = []
    for tokens in (64, 256):
        given, selected = inputs(tokens, 4, batch=1, dtype=torch.float32)
        with Meter() as meter:
            output, _ = absorbed._forward(*(tensor.detach() for tensor in given), selected, WIDTHS.key, SCALE, "none")
        extra.append(meter.peak.device - output.nbytes)
    assert extra[1] < 2 * extra[0]
