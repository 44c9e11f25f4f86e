"""The table of places, by masks and by index, and its way over ranks, which do not matter where there is one."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed.features.deepspeed_moe.gating import Routing, admit, choose
from mindspeed.features.deepspeed_moe.tables import RowOrder, combine_by_masks, dispatch_by_masks
from mindspeed.moe.capacity import CapacityOptions, with_options

GROUPS, TOKENS, EXPERTS, WIDTH = 2, 10, 4, 6


def routing(topk: int, capacity: int, weights: bool = True) -> tuple[Routing, Tensor]:
    generator = torch.Generator().manual_seed(topk)
    logits = torch.randn(GROUPS, TOKENS, EXPERTS, generator=generator, dtype=torch.float64).requires_grad_(weights)
    return admit(choose(logits, topk), capacity), logits


@pytest.mark.parametrize("capacity", [1, 3, 10])
@pytest.mark.parametrize("topk", [1, 2, 3])
def test_both_ways_fill_the_same_table_and_leave_empty_places_zero(topk: int, capacity: int) -> None:
    given, _ = routing(topk, capacity)
    x = torch.randn(GROUPS * TOKENS, WIDTH, dtype=torch.float64)
    table = dispatch_by_masks(x, given)
    assert torch.equal(table, RowOrder.of(given).dispatch(x))
    expected = torch.zeros(EXPERTS, GROUPS, capacity, WIDTH, dtype=torch.float64)
    for group, token, choice in torch.cartesian_prod(*(torch.arange(n) for n in (GROUPS, TOKENS, topk))).tolist():
        slot = int(given.slot[group, token, choice])
        if slot < capacity:
            expected[given.expert[group, token, choice], group, slot] = x[group * TOKENS + token]
    assert torch.equal(table, expected.flatten(0, 2))


@pytest.mark.parametrize("capacity", [2, 10])
@pytest.mark.parametrize("topk", [1, 2, 3])
def test_both_ways_give_the_same_answers_and_gradients(topk: int, capacity: int) -> None:
    results = []
    for by_index in (False, True):
        given, logits = routing(topk, capacity)
        x = torch.randn(
            GROUPS * TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        ).requires_grad_()
        order = RowOrder.of(given)
        table = order.dispatch(x) if by_index else dispatch_by_masks(x, given)
        answers = table.tanh() * torch.arange(1, table.shape[0] + 1).unsqueeze(1)
        y = order.combine(answers, x.shape[0]) if by_index else combine_by_masks(answers, given)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, logits))))
    torch.testing.assert_close(*results)


def in_type(dtype: torch.dtype, by_index: bool) -> list[Tensor]:
    """Answers and gradients of inputs and router of experts that differ, computed in a type, with choices made in fp32."""
    draw = torch.Generator().manual_seed(3)
    x, router, experts, dy = (
        torch.randn(shape, generator=draw).bfloat16().to(dtype).requires_grad_()
        for shape in ((TOKENS, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH, WIDTH), (TOKENS, WIDTH))
    )
    logits = x.to(torch.promote_types(dtype, torch.float32)) @ router.to(torch.promote_types(dtype, torch.float32))
    given = admit(choose(logits.unsqueeze(0), 2), 5)
    order = RowOrder.of(given)
    table = order.dispatch(x) if by_index else dispatch_by_masks(x, given)
    rows = (table.view(EXPERTS, -1, WIDTH) @ experts).tanh().flatten(0, 1)
    y = order.combine(rows, TOKENS) if by_index else combine_by_masks(rows, given)
    return [value.detach().double() for value in (y, *torch.autograd.grad(y, (x, router, experts), dy))]


def test_rows_by_index_are_as_near_in_bf16_as_products_with_masks() -> None:
    exact = in_type(torch.float64, by_index=False)
    for masks, index, value in zip(in_type(torch.bfloat16, False), in_type(torch.bfloat16, True), exact, strict=True):
        allowed = 0.02 * value.abs().max()
        assert (masks - value).abs().max() <= allowed
        assert (index - value).abs().max() <= allowed


def saved_bytes(by_index: bool) -> int:
    """Bytes of the tensors with T x E x C numbers that dispatch and combine keep for backward."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() >= GROUPS * TOKENS * EXPERTS * 3:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    given, _ = routing(2, 3)
    x = torch.randn(GROUPS * TOKENS, 1, dtype=torch.float64).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        order = RowOrder.of(given)
        if by_index:
            order.combine(order.dispatch(x), x.shape[0])
        else:
            combine_by_masks(dispatch_by_masks(x, given), given)
    return sum(kept.values())


def test_nothing_of_tokens_experts_and_places_is_kept_by_index() -> None:
    assert saved_bytes(by_index=True) == 0
    assert saved_bytes(by_index=False) >= 2 * GROUPS * TOKENS * EXPERTS * 3 * 8


@dataclass
class Spec:
    module: Any
    params: dict[str, Any]
    submodules: Any = None


def test_options_are_changed_in_copies_of_the_specs_that_have_them() -> None:
    spec = Spec("layer", {}, submodules=[Spec("moe", {"options": CapacityOptions(), "other": 1}), Spec("mlp", {})])
    changed = with_options(spec, rearranged=True)
    assert changed.submodules[0].params == {"options": CapacityOptions(rearranged=True), "other": 1}
    assert changed.submodules[1] is spec.submodules[1]
    assert spec.submodules[0].params["options"] == CapacityOptions()


def test_padding_gives_at_most_eight_capacities_that_are_enough() -> None:
    options = CapacityOptions(dropless=True, padding=True)
    capacities = [options.padded(need, 100) for need in range(101)]
    assert all(need <= capacity <= 100 for need, capacity in enumerate(capacities))
    assert len(set(capacities)) == 8
    assert [CapacityOptions(dropless=True).padded(need, 100) for need in (0, 1, 57, 100)] == [1, 1, 57, 100]
