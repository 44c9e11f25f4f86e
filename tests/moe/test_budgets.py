"""Kernels, bytes and reads beside the grouped products of torch_npu, of experts with a weight parameter each."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mindspeed
from mindspeed.features.grouped_matmul_add.layers import AccumulatingExperts
from mindspeed.moe.grouped_experts import SeparateExperts
from mindspeed.platforms.host_reads import host_reads
from tests.npu_contract import bodies
from tests.npu_contract.beside import Beside, count

EXPERTS, HIDDEN, WIDTH = 4, 64, 128
COUNTS = [16, 0, 40, 8]
PACKAGE = Path(mindspeed.__file__).parent


@pytest.fixture(autouse=True)
def _npu() -> Iterator[None]:
    with bodies.installed():
        yield


class Experts(SeparateExperts):
    """Experts without Megatron's groups and initialization."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(moe_apply_probs_on_input=False, gated_linear_unit=False, activation_func=torch.relu)
        self.activation_recompute, self.activation_func, self.num_local_experts = False, torch.relu, EXPERTS
        self.linear_fc1, self.linear_fc2 = layers(WIDTH, HIDDEN), layers(HIDDEN, WIDTH)


class Accumulating(AccumulatingExperts, Experts):
    """The same with gradients that are added to buffers."""


def layers(outputs: int, inputs: int) -> torch.nn.Module:
    made = torch.nn.Module()
    made.weight_gradients_wait = False  # type: ignore[assignment]
    for expert in range(EXPERTS):
        weight = torch.nn.Parameter(torch.randn(outputs, inputs, dtype=torch.bfloat16))
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(outputs, inputs), False  # type: ignore[attr-defined]
        made.register_parameter(f"weight{expert}", weight)
    return made


def both_ways(experts: SeparateExperts) -> tuple[Beside, Beside, list[str]]:
    """What forward and backward run beside the products, and the reads of the device that experts make."""
    x = torch.randn(sum(COUNTS), HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    counts, results = torch.tensor(COUNTS), []
    with host_reads() as reads:
        forward = count(lambda: results.append(experts(x, counts, None)[0]))
        backward = count(lambda: torch.autograd.backward(results[0].sum()))
    return forward, backward, [str(read) for read in reads if str(PACKAGE) in read.file]


def test_products_take_the_weights_of_experts_where_they_are() -> None:
    forward, backward, reads = both_ways(Experts())
    assert (reads, forward.reads, backward.reads) == ([], 0, 0)
    assert forward.kernels <= 2, forward  # the ends of experts, and the activation
    assert backward.kernels <= 5, backward  # the gradient of the sum and of the activation


def test_gradients_of_experts_are_added_to_their_buffers_without_a_read() -> None:
    experts = Accumulating()
    forward, backward, reads = both_ways(experts)
    assert (reads, forward.reads, backward.reads) == ([], 0, 0)
    assert forward.kernels <= 4, forward  # counts are copied to the host
    assert backward.kernels <= 9, backward  # three on counts for each product
    assert all(bool(weight.main_grad.any()) == (number != 1) for number, weight in enumerate(experts.linear_fc1.parameters()))


def test_gradients_in_buffers_are_those_of_the_parameters() -> None:
    plain, accumulating = Experts(), Accumulating()
    accumulating.load_state_dict(plain.state_dict())
    x = torch.randn(sum(COUNTS), HIDDEN, dtype=torch.bfloat16)
    for experts in (plain, accumulating):
        torch.autograd.backward(experts(x, torch.tensor(COUNTS), None)[0].float().square().sum())
    for ours, theirs in zip(accumulating.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(ours.main_grad, theirs.grad.float(), rtol=1e-2, atol=1e-2)
