"""The bytes that leave a layer; tests/memory/test_layer_parts.py holds every layout to equal bits."""

import pytest

from tests.conftest import Prove
from tests.memory.test_layer_parts import exact

SAVED = 24 * 32 * 4 * (1 + 3 + 1) + 3 * 4 * 24 * 24 * 4
"""Bytes of a layer: input and output of linear_qkv, input of linear_proj, and softmax with its dropout for each head."""


@pytest.mark.long
def test_three_of_four_layers_are_on_the_host(prove: Prove) -> None:
    without, swapped = exact(prove, "swap-attention", nproc=1)["saved activations"]
    assert without - swapped == 3 * SAVED
