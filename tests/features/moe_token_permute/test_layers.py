"""The stand-ins against Megatron's own functions, for every kind of routing."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from mindspeed.features.moe_token_permute import configuration, layers
from mindspeed.moe import routing as library

TOKENS, EXPERTS, WIDTH, CAPACITY = 12, 4, 6, 5


def top_two(seed: int = 0) -> torch.Tensor:
    chosen = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed)).topk(2, dim=1).indices
    return torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, chosen, True)


def local(seed: int = 0) -> torch.Tensor:
    """What the allgather dispatcher sees of two experts: some tokens go to none of them."""
    return top_two(seed)[:, :2].contiguous()


def uneven() -> torch.Tensor:
    """As many rows as tokens times two, and yet not two for each token."""
    routing = top_two()
    routing[0], routing[1] = True, False
    return routing


def with_capacity(seed: int = 0) -> torch.Tensor:
    scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    chosen = scores.topk(CAPACITY, dim=0).indices
    return torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(0, chosen, True)


ROUTINGS = {
    "two experts each": (top_two(), False),
    "one expert each": (torch.eye(EXPERTS, dtype=torch.bool).repeat(TOKENS // EXPERTS, 1), False),
    "local experts": (local(), False),
    "uneven": (uneven(), False),
    "nobody": (torch.zeros(TOKENS, EXPERTS, dtype=torch.bool), False),
    "no tokens": (torch.zeros(0, EXPERTS, dtype=torch.bool), False),
    "capacity": (with_capacity(), True),
    "capacity not filled": (with_capacity() & with_capacity(1), True),
}


def there_and_back(functions, routing, padded, weigh, dtype):
    """Rows, their probabilities, the tokens that come back, and all gradients."""
    torch.manual_seed(1)
    tokens = torch.randn(routing.shape[0], WIDTH, dtype=dtype, requires_grad=True)
    probs = torch.rand(routing.shape, requires_grad=True)
    number = CAPACITY * routing.shape[1] if padded else int(routing.sum())
    rows, of_rows, order = functions.permute(tokens, routing, probs, number, drop_and_pad=padded)
    answers = (rows * of_rows[:, None]).to(dtype) if not weigh else rows * 1
    given = {"probs": probs, "routing_map": routing} if weigh else {}
    back = functions.unpermute(answers, order, torch.Size(tokens.shape), drop_and_pad=padded, **given)
    (back.float() * torch.linspace(-1, 1, back.numel()).view_as(back)).sum().backward()
    return rows, of_rows, back, tokens.grad, probs.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weigh", [False, True], ids=["weighed by experts", "weighed on the way back"])
@pytest.mark.parametrize("case", ROUTINGS)
def test_rows_probabilities_tokens_and_gradients_are_megatrons(case, weigh, dtype):
    routing, padded = ROUTINGS[case]
    ours = there_and_back(layers, routing, padded, weigh, dtype)
    theirs = there_and_back(moe_utils, routing, padded, weigh, dtype)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    tolerance = 1e-6 if dtype == torch.float32 else 3e-2
    for name, mine, reference in zip(("tokens", "gradient of tokens", "gradient of probs"), ours[2:], theirs[2:], strict=True):
        assert mine.dtype == reference.dtype
        torch.testing.assert_close(
            mine, reference, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", ["permute", "unpermute"])
def test_stand_ins_take_what_megatrons_functions_take(name):
    parameters = [
        [(p.name, p.default) for p in inspect.signature(getattr(module, name)).parameters.values()]
        for module in (layers, moe_utils)
    ]
    assert parameters[0][: len(parameters[1])] == parameters[1]  # newer releases have further ones


@pytest.mark.parametrize("case", ["two experts each", "local experts", "uneven"])
def test_choices_are_those_of_routers_unless_there_are_more_rows(case, monkeypatch):
    """Padding for quantization adds rows, of which a token then may have any number."""
    routing = ROUTINGS[case][0]
    added = routing | (torch.arange(TOKENS)[:, None] < 2)
    monkeypatch.setattr(layers.ms, "active_feature", lambda name: SimpleNamespace(topk=2))
    assert layers.permute(torch.zeros(TOKENS, WIDTH), added)[2].shape[1] == added.shape[1]
    if case != "uneven":
        assert layers.permute(torch.zeros(TOKENS, WIDTH), routing)[2].shape[1] == 2
        assert torch.equal(*(there_and_back(f, routing, False, False, torch.float32)[0] for f in (layers, moe_utils)))


def test_in_bf16_the_rows_of_a_token_are_rounded_once():
    routing = torch.ones(1, 8, dtype=torch.bool)
    rows = torch.tensor([256.0] + [1.0] * 7).bfloat16()[:, None]
    _, _, order = layers.permute(torch.zeros(1, 1).bfloat16(), routing)
    assert float(layers.unpermute(rows, order, (1, 1))) == 264  # bf16 knows 262 and 264, and 263 lies between


def test_chunks_are_sorted_by_megatrons_own_code_whatever_is_asked():
    sort = layers.without_transformer_engine(moe_utils.sort_chunks_by_idxs)
    rows, probs, sizes, order = torch.randn(6, 2), torch.rand(6), torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1])
    for ours, theirs in zip(
        sort(rows, sizes, order, probs=probs, fused=True),
        moe_utils.sort_chunks_by_idxs(rows, sizes, order, probs=probs),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_a_configuration_that_asks_for_the_fusion_is_accepted_and_keeps_its_word():
    seen = []
    config = SimpleNamespace(moe_permute_fusion=True)
    configuration.with_permute_fusion(lambda config: seen.append(config.moe_permute_fusion))(config)
    assert (seen, config.moe_permute_fusion) == ([False], True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("topk", [3, 5, None])
@pytest.mark.parametrize("tokens", [[2, 0, 0, 3, 1, 3, 3], []], ids=["uneven", "no rows"])
def test_rows_of_other_dispatchers_are_theirs_with_sums_that_are_rounded_once(tokens, topk, dtype):
    routing = torch.zeros(4, max(1, len(tokens)), dtype=torch.bool)
    for row, token in enumerate(tokens):
        routing[token, row] = True
    results = []
    for functions, kind in ((layers, dtype), (library, torch.float64)):
        x = torch.linspace(-2, 3, 12).view(4, 3).to(dtype).to(kind).requires_grad_()
        index = library.RowIndex(routing, library.positions_of(routing, len(tokens)), topk)
        rows = functions.take_rows(x, index)
        back = functions.sum_rows(rows * 3, index)
        back.square().sum().backward()
        results.append([rows.detach(), back.detach(), x.grad])
    for ours, exact in zip(*results, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, exact.to(dtype), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)
    assert torch.equal(results[0][0], results[1][0].to(dtype))


def test_batch_invariant_sums_stay_megatrons():
    def their_permute(tokens, routing_map, tokens_per_expert=None, return_batch_invariant_inverse_map=False):
        return "permuted", return_batch_invariant_inverse_map

    def their_unpermute(rows, indices, restore_shape, batch_invariant_inverse_map=None):
        return "summed", batch_invariant_inverse_map

    copied = layers.with_operator(their_permute)(None, None, return_batch_invariant_inverse_map=True)
    assert copied == ("permuted", True)
    assert layers.with_sums(their_unpermute)(None, None, (1, 1), batch_invariant_inverse_map="map") == ("summed", "map")
    assert layers.with_sums(lambda rows, indices, restore_shape: rows) is layers.unpermute
