"""Statistics of logits and their gradients, against autograd."""

import pytest
import torch

from mindspeed.ops import logit_gradient, logit_statistics
from mindspeed.ops.logit_statistics import EXPECTED, LOG_SUM, PICKED, TOTAL
from tests.ops.operator_checks import randn, refused

OPTIONS = [(False, False), (True, False), (False, True), (True, True)]


def drawn(tokens, width, dtype=torch.float64):
    """Logits, and labels of which each third one is not among them."""
    rows = torch.randint(width, (tokens,), generator=torch.Generator().manual_seed(2)) if width else torch.zeros(tokens).long()
    rows[::3] = -1
    return 4 * randn(tokens, width, dtype=dtype, grad=False), rows


def by_autograd(logits, rows, with_total, with_expected):
    """The statistics as a function of logits that autograd differentiates, the largest logit being a constant."""
    z = logits - logits.detach().amax(-1, keepdim=True)
    sums = z.exp().sum(-1).log(), torch.where(rows < 0, 0, logits.gather(1, rows.clamp_min(0)[:, None])[:, 0])
    total = z.sum(-1) if with_total else torch.zeros_like(sums[0])
    expected = (z.softmax(-1) * z).sum(-1) if with_expected else torch.zeros_like(sums[0])
    return torch.stack((*sums, total, expected))


@pytest.mark.parametrize(("with_total", "with_expected"), OPTIONS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (17, 300), (9, 4097)])
def test_statistics_and_gradients_are_those_of_autograd(shape, with_total, with_expected):
    logits, rows = drawn(*shape)
    leaf = logits.clone().requires_grad_()
    wanted = by_autograd(leaf, rows, with_total, with_expected)
    factors = randn(4, shape[0], grad=False, seed=3)
    wanted.backward(factors)

    largest, sums = logit_statistics(logits, rows, with_total, with_expected)
    assert torch.equal(largest, logits.amax(-1))
    found = sums.clone()
    found[LOG_SUM], found[EXPECTED] = sums[LOG_SUM].log(), sums[EXPECTED] / sums[LOG_SUM]
    torch.testing.assert_close(found, wanted.detach())

    factors[LOG_SUM] += factors[EXPECTED] * (1 - found[EXPECTED]) if with_expected else 0
    logit_gradient(logits, largest, found[LOG_SUM], factors, rows, with_total, with_expected)
    torch.testing.assert_close(logits, leaf.grad)


def test_no_tokens_and_tokens_without_a_label():
    logits, rows = drawn(0, 8)
    largest, sums = logit_statistics(logits, rows)
    assert (largest.shape, sums.shape) == ((0,), (4, 0))
    logit_gradient(logits, largest, sums[LOG_SUM], sums, rows)
    logits, _ = drawn(3, 8)
    _, sums = logit_statistics(logits, torch.full((3,), -1))
    assert sums[PICKED].tolist() == sums[TOTAL].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: logit_statistics(torch.ones(4), torch.zeros(4).long()), "logits of shape (4,) must be a matrix"),
        (lambda: logit_statistics(torch.ones(4, 2), torch.zeros(3).long()), "rows must be one int64 for each token, on cpu"),
        (lambda: logit_statistics(torch.ones(4, 2), torch.zeros(4)), "rows must be one int64 for each token, on cpu"),
    ],
)
def test_wrong_statistics_are_refused(call, message):
    with refused(f"logit_statistics: {message}"):
        call()


def test_wrong_gradients_are_refused():
    logits, rows = drawn(3, 8, torch.bfloat16)
    of_sums = torch.zeros(3)
    with refused("logit_gradient: largest and log_sums must be [3], and factors [4, 3]"):
        logit_gradient(logits, of_sums, of_sums, torch.zeros(3, 3), rows)
    with refused("logit_gradient: statistics and factors must be torch.float32"):
        logit_gradient(logits, of_sums.double(), of_sums, torch.zeros(4, 3), rows)
    with refused("logit_gradient: rows must be one int64 for each token, on cpu"):
        logit_gradient(logits, of_sums, of_sums, torch.zeros(4, 3), rows.int())


@pytest.mark.parametrize("width", [37, 9000])
def test_masked_logits_count_nothing_and_a_nan_is_kept(width):
    logits, rows = drawn(3, width, torch.float32)
    logits[:, : width // 2] = -torch.inf
    rows[:] = width - 1
    largest, sums = logit_statistics(logits, rows, with_expected=True)
    kept = logits[:, width // 2 :].double()
    z = kept - kept.amax(-1, keepdim=True)
    torch.testing.assert_close(sums[LOG_SUM].double(), z.exp().sum(-1), rtol=1e-5, atol=0)
    torch.testing.assert_close(sums[EXPECTED].double(), (z * z.exp()).sum(-1), rtol=1e-5, atol=1e-5)
    logit_gradient(logits, largest, sums[LOG_SUM].log(), torch.ones(4, 3), rows, with_expected=True)
    assert logits[:, : width // 2].abs().max() < 1e-30
    logits[0, 3] = torch.nan
    assert logit_statistics(logits, rows)[0].isnan().tolist() == [True, False, False]


def test_a_label_beyond_the_logits_is_refused():
    logits, rows = drawn(3, 8, torch.float32)
    rows[2] = 8
    with pytest.raises((IndexError, RuntimeError), match="8"):
        logit_statistics(logits, rows)
    largest, sums = logit_statistics(logits, torch.zeros_like(rows))
    with pytest.raises((IndexError, RuntimeError), match="8"):
        logit_gradient(logits, largest, sums[LOG_SUM].log(), sums, rows)
