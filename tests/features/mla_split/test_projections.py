"""The up-projections beside products that are split and concatenated, and the order of their collectives."""

import pytest
import torch

import mindspeed
from mindspeed.features.mla_split.projections import LatentExchange, keys_and_values
from mindspeed.memory.meter import Meter
from mindspeed.tensor_parallel.linear import plain_weight_gradient
from mindspeed.workbench.verification.pool import WorkerPool
from tests.features.mla_split.ranks import WIDTHS, beside_one_rank, concatenated, inputs


def test_keys_and_values_are_those_of_one_product_that_is_split() -> None:
    given = inputs()
    made = keys_and_values(*given, WIDTHS, LatentExchange(None, given[0], False), plain_weight_gradient)
    wanted = concatenated(*given)
    chosen = [torch.randn_like(tensor) for tensor in wanted]
    torch.testing.assert_close(made, wanted)
    found, expected = (torch.autograd.grad(pair, given, chosen) for pair in (made, wanted))
    torch.testing.assert_close(found, expected)
    assert all(tensor.is_contiguous() for tensor in made)


@pytest.mark.parametrize("frozen", [1, 2])
def test_frozen_inputs_get_no_gradient(frozen: int) -> None:
    given = inputs()
    given[frozen].requires_grad_(False)
    learned = [tensor for tensor in given if tensor.requires_grad]
    made = keys_and_values(*given, WIDTHS, LatentExchange(None, given[0], False), plain_weight_gradient)
    found, expected = (torch.autograd.grad([t.sum() for t in pair], learned) for pair in (made, concatenated(*given)))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_have_the_gradients_of_one(pool: WorkerPool, sequence_parallel: bool) -> None:
    plan = mindspeed.plan(platform="cpu", world={"world_size": 2, "tp": 2})
    latent, rotary = 2 * 8 * 6 * 8, 2 * 8 * 2 * 8  # batch, tokens, width, bytes of fp64
    for largest, events in pool.call(beside_one_rank, 2, sequence_parallel, plan=plan):
        assert largest < 1e-12
        if sequence_parallel:
            gathers = [f"gather {latent // 2}", f"gather {rotary // 2}", f"gather {latent // 2}"]
            backward = [f"gather {latent // 2}", "product", f"scatter {latent}", "product"]
            assert events == [*gathers, *["product"] * 3, *backward, *backward, f"scatter {rotary}"]
        else:
            backward = ["product", f"sum {latent}", "product"]
            assert events == [*["product"] * 3, *backward, *backward, f"sum {rotary}"]


def test_forward_holds_keys_and_values_and_one_product_at_its_peak() -> None:
    x, positions, weight = (tensor.detach() for tensor in inputs())
    x, positions = x.repeat(100, 1, 1), positions.repeat(100, 1, 1, 1)
    with Meter() as ours:
        keys_and_values(x, positions, weight, WIDTHS, LatentExchange(None, x, False), plain_weight_gradient)
    with Meter() as megatrons:
        key, value = concatenated(x, positions, weight)
        attended = key, value.contiguous()
        assert attended[1].is_contiguous()
    heads = x.shape[0] * x.shape[1] * WIDTHS.heads * x.element_size()
    made = heads * (WIDTHS.key + WIDTHS.rope)
    assert ours.peak.host == weight.nbytes + made + heads * max(WIDTHS.key, WIDTHS.value)
    assert megatrons.peak.host == made + heads * (WIDTHS.key + WIDTHS.value) + heads * WIDTHS.value
