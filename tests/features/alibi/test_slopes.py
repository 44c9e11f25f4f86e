"""Slopes against numbers from the paper, and the values of the bias against a loop over tokens."""

import math

import pytest
import torch

from mindspeed.context_parallel.position_bias import PositionBias, slopes_of

KNOWN = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    3: [2**-4, 2**-8, 2**-2],
    8: [2**-n for n in range(1, 9)],
    12: [*(2**-n for n in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}
"""By hand: halves from 1/2 for eight heads, as in the paper; for twelve, every second one of the sixteen beside those."""


@pytest.mark.parametrize("heads", KNOWN)
def test_slopes_are_those_of_the_paper(heads):
    assert slopes_of(heads) == pytest.approx(KNOWN[heads], rel=1e-15)


def test_no_two_of_forty_heads_have_one_slope():
    assert len(set(slopes_of(40))) == 40
    assert all(2**-8 <= slope < 1 for slope in slopes_of(40))


@pytest.mark.parametrize("form", ["distance", "root", "signed"])
@pytest.mark.parametrize("fill", [False, True])
def test_values_are_those_of_a_loop(form, fill):
    bias = PositionBias((0.5, 0.25, 0.125), form, fill=fill)
    found = bias.values(4, 6, torch.device("cpu"), torch.float64)
    for head, slope in enumerate(bias.slopes):
        for row in range(4):
            for key in range(6):
                query = row + 2
                far = {"distance": -abs(query - key), "root": -math.sqrt(abs(query - key)), "signed": key - query}[form]
                wanted = -math.inf if fill and key > query else slope * far
                assert found[head, row, key] == pytest.approx(wanted)


def test_values_first_made_in_inference_serve_training():
    bias = PositionBias((0.3,))
    with torch.inference_mode():
        bias.values(5, 5, torch.device("cpu"), torch.float32)
        bias.slopes_on(torch.device("cpu"))
    x = torch.ones(5, 5, requires_grad=True)
    (x * bias.values(5, 5, x.device, torch.float32) * bias.slopes_on(x.device)).sum().backward()
    assert x.grad is not None
