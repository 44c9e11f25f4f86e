import pytest
import torch

from mindspeed.ops import logit_gradient, logit_statistics
from mindspeed.ops.registration import operators
from tests.ops.triton.kernels import TYPES, leaf, on_triton


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("with_total", "with_expected"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 300), (2, 20001)])
def test_statistics_and_gradients_are_those_of_the_reference(shape, with_total, with_expected, dtype):
    options = with_total, with_expected
    logits = (3 * leaf(*shape, dtype=dtype, grad=False)).to(dtype)
    rows = torch.randint(-1, shape[1], shape[:1], generator=torch.Generator().manual_seed(2))
    largest, sums = operators()["logit_statistics"](logits, rows, *options)
    arguments = largest, sums[0].log(), leaf(4, shape[0], seed=4, grad=False), rows
    wanted, found = logits.clone(), logits.clone()
    operators()["logit_gradient"](wanted, *arguments, *options)
    with on_triton() as ran:
        statistics = logit_statistics(logits, rows, *options)
        logit_gradient(found, *arguments, *options)
    assert ran == {"statistics", "gradient"}
    torch.testing.assert_close(statistics, (largest, sums), rtol=2e-6, atol=2e-6 * float(sums.abs().max()))
    torch.testing.assert_close(found, wanted, rtol=2.0**-7 if dtype == torch.bfloat16 else 2.0**-10, atol=2e-6)
