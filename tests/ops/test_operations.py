"""Every operator that multiplies matrices counts its operations for torch's counter."""

import dis
import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import mindspeed.ops
from mindspeed.ops import fusion_attention, npu_gmm
from mindspeed.ops.attention_mask import AttentionVisibility
from mindspeed.ops.registration import operators

PRODUCTS = {"matmul", "mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "einsum", "linear", "addbmm", "_int_mm"}


def functions(function: Any, seen: set[Any]) -> Iterator[FunctionType]:
    """A function and every function of mindspeed that it calls."""
    if not isinstance(function, FunctionType) or function in seen or not function.__module__.startswith("mindspeed."):
        return
    seen.add(function)
    yield function
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        yield from functions(value, seen)
        if isinstance(value, ModuleType):
            for other in function.__code__.co_names:
                yield from functions(vars(value).get(other), seen)


def multiplies(reference: Callable[..., Any]) -> bool:
    for function in functions(reference, set()):
        instructions = dis.get_instructions(function.__code__)
        if any(i.argval in PRODUCTS or (i.opname == "BINARY_OP" and i.argrepr.startswith("@")) for i in instructions):
            return True
    return False


def all_operators() -> dict[str, Callable[..., Any]]:
    for module in pkgutil.iter_modules(mindspeed.ops.__path__):
        if not module.ispkg:
            importlib.import_module(f"mindspeed.ops.{module.name}")
    return operators()


def test_an_operator_that_multiplies_has_a_formula_and_no_other_has() -> None:
    multiplying = {name for name, reference in all_operators().items() if multiplies(reference)}
    counted = {name for name in all_operators() if getattr(torch.ops.mindspeed, name) in flop_registry}
    calling = {"npu_mm_all_reduce_add_rms_norm_", "npu_gmm_separate"}  # call an operator that multiplies
    assert counted == multiplying | calling


def test_attention_counts_the_pairs_that_its_mode_lets_see() -> None:
    q = torch.randn(2, 4, 10, 8, requires_grad=True)
    k, v = (torch.randn(2, 2, 10, 8, requires_grad=True) for _ in range(2))
    mask = torch.ones(10, 10, dtype=torch.bool).triu(1)
    band = {"atten_mask": mask, "sparse_mode": 0, "pre_tokens": 1}
    for keywords, pairs in (({}, 100), ({"atten_mask": mask, "sparse_mode": 2}, 55), ({"atten_mask": mask}, 55), (band, 19)):
        with FlopCounterMode(display=False) as counter:
            fusion_attention(q, k, v, 4, "BNSD", **keywords)[0].sum().backward()
        assert counter.get_total_flops() == 3 * 2 * 2 * 4 * (8 + 8) * pairs


def test_packed_sequences_count_one_by_one() -> None:
    q, k, v = (torch.randn(10, 2, 8) for _ in range(3))
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    ends = [4, 10]
    with FlopCounterMode(display=False) as counter:
        fusion_attention(q, k, v, 2, "TND", atten_mask=mask, sparse_mode=3, actual_seq_qlen=ends, actual_seq_kvlen=ends)
    assert counter.get_total_flops() == 2 * 2 * 16 * (4 * 5 // 2 + 6 * 7 // 2)


def test_groups_of_a_product_count_their_rows_together() -> None:
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4, 5, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        npu_gmm(x, weight, group_list=[1, 1, 6]).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * 4 * 5


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (4, 7), (7, 5)])
def test_pairs_are_those_that_a_mask_of_the_bounds_leaves(queries: int, keys: int) -> None:
    cpu = torch.device("cpu")
    for first, last in itertools.product((None, -3, 0), (None, 0, 3)):
        seen = AttentionVisibility(first, last)
        hidden = seen.hidden((0, queries), (0, keys), cpu)
        expected = queries * keys - (0 if hidden is None else int(hidden.expand(queries, keys).sum()))
        assert seen.pairs(queries, keys) == expected
    for last, end in itertools.product((-1, 0, 3), (0, 2, keys)):
        seen = AttentionVisibility(None, last, prefix=(end, end))
        hidden = seen.hidden((0, queries), (0, keys), cpu)
        assert hidden is not None
        assert seen.pairs(queries, keys, 2) == 2 * queries * keys - int(hidden.sum())
