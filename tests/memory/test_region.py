import gc

import pytest
import torch
import torch.nn.functional as F

from mindspeed.memory.byte_count import Bytes
from mindspeed.memory.meter import Meter
from mindspeed.memory.recomputation import RandomState
from mindspeed.memory.region import Region
from mindspeed.problems import RunError

SIZE = 8
FLOAT = 4


class Norm(torch.nn.Module):
    """A composite norm that uses its input twice, with dropout and a mask that is made elsewhere."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, SIZE))
        self.register_buffer("mask", torch.ones(SIZE))
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight
        return F.dropout(normed, self.dropout) * self.mask


def train(region: Region | None, steps: int = 2, watch: bool = False) -> list[torch.Tensor]:
    """A residual layer of norm and linear, two micro-batches in flight: losses and gradients."""
    torch.manual_seed(0)
    norm, linear = Norm(), torch.nn.Linear(SIZE, SIZE)
    inputs = torch.randn(steps, 3, SIZE).requires_grad_()
    losses = []
    for x in inputs:
        hidden = x * 2
        if region is None:
            output = linear(norm(hidden))
        else:
            with region.entered(norm, hidden) as pass_:
                normed = norm(hidden)
            output = linear(normed)
            parked = pass_.park_after(output, normed)
            assert parked is not None
            assert parked.bytes > normed.numel() * FLOAT
            if watch:
                assert torch.isnan(normed).all()
            else:
                assert normed.untyped_storage().nbytes() == 0
        losses.append((hidden + output).square().sum())
    for loss in losses:
        loss.backward()
    after = torch.rand(1)
    gradients = [tensor.grad for tensor in (inputs, norm.weight, linear.weight, linear.bias)]
    return [*losses, *gradients, after]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_region_is_bit_equal_with_dropout_and_draws_no_random_numbers():
    assert equal(train(None), train(Region("test")))


def test_a_wrong_random_state_would_be_noticed(monkeypatch):
    monkeypatch.setattr("mindspeed.memory.region.generators", lambda: ())
    assert not equal(train(None), train(Region("test")))


def test_a_generator_of_the_caller_is_replayed():
    drawn = []
    state = [0]

    def function(x):
        drawn.append(state[0])
        state[0] += 1
        return x.exp()

    x = torch.randn(3, requires_grad=True)
    region = Region("test", [RandomState(lambda: state[0], lambda value: state.__setitem__(0, value))])
    with region.entered(function, x) as pass_:
        y = function(x)
    output = y.square()
    pass_.park_after(output, y)
    state[0] = 7
    output.sum().backward()
    assert drawn == [0, 0, 0]  # the pass, its repetition, and backward
    assert state == [7]


def test_parameters_buffers_and_inputs_stay():
    norm, x = Norm(), torch.randn(3, SIZE, requires_grad=True)
    region = Region("test")
    with region.entered(norm, x) as pass_:
        normed = norm(x)
    pass_.park_after(normed * 2, normed)
    assert all(tensor.untyped_storage().nbytes() for tensor in (norm.weight, norm.mask, x))


def test_a_function_that_returns_its_input_parks_nothing_of_it():
    x = torch.randn(3, requires_grad=True)
    hidden = x * 1
    with Region("test").entered(lambda value: value, hidden) as pass_:
        y = hidden
    parked = pass_.park_after(y * 2, y)
    assert parked is not None
    assert parked.bytes == 0
    assert hidden.untyped_storage().nbytes() == 12


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_is_parked_where_no_backward_pass_follows(frozen):
    norm, x = Norm().requires_grad_(not frozen), torch.randn(3, SIZE)
    with torch.set_grad_enabled(frozen), Region("test").entered(norm, x) as pass_:
        normed = norm(x)
        assert pass_.park_after(normed * 2, normed) is None
    assert normed.untyped_storage().nbytes() == 3 * SIZE * FLOAT


def test_the_bytes_of_a_region_are_given_back_until_backward():
    norm, x = Norm(), torch.randn(3, SIZE, requires_grad=True)
    one = 3 * SIZE * FLOAT

    def kept(region: Region | None) -> Bytes:
        with Meter() as meter:
            if region is None:
                output = norm(x).square()
            else:
                with region.entered(norm, x) as pass_:
                    normed = norm(x)
                output = normed.square()
                pass_.park_after(output, normed)
                del normed
            live = meter.live
            output.sum().backward()
            del output
        assert live.device == 0
        return live

    saved = 3 * one + 3 * FLOAT  # input times root, dropout mask, output; and the root
    assert kept(None).host == one + saved
    assert kept(Region("test")).host == one


def test_nothing_is_left_after_backward_without_the_garbage_collector():
    norm, x = Norm(), torch.randn(3, SIZE, requires_grad=True)
    region = Region("test")
    norm.weight.grad, x.grad = torch.zeros(SIZE), torch.zeros(3, SIZE)
    gc.disable()
    try:
        with Meter() as meter:
            hidden = x * 2
            with region.entered(norm, hidden) as pass_:
                normed = norm(hidden)
            output = normed.square()
            pass_.park_after(output, normed)
            output.sum().backward()
            del hidden, normed, output, pass_
            assert meter.live == Bytes()
    finally:
        gc.enable()


def test_a_region_under_hooks_is_seen_by_them():
    seen = []

    def pack(tensor):
        seen.append(tensor.shape)
        return tensor

    x = torch.randn(3, SIZE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        norm = Norm()
        norm(x)
        without = list(seen)
        seen.clear()
        with Region("test").entered(norm, x):
            norm(x)
    assert seen == without


def test_a_region_leaves_alone_what_other_hooks_have_moved():
    x = torch.randn(3, SIZE, requires_grad=True)
    norm = Norm(0.0)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda packed: packed), Region("test").entered(norm, x) as pass_:
        normed = norm(x)
    output = normed.square()
    parked = pass_.park_after(output, normed)
    assert parked is not None
    assert parked.bytes == 3 * SIZE * FLOAT
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(norm(x).square().sum(), x)[0])


def test_poison_fills_with_nan_what_would_be_freed(poison):
    poisoned = train(Region("test"), watch=True)
    assert equal(train(None), poisoned)


def backward_of(function, x: torch.Tensor, before_backward=lambda: None) -> None:
    with Region("norms").entered(function, x) as pass_:
        y = function(x)
    output = y.square()
    pass_.park_after(output, y)
    before_backward()
    output.sum().backward()


SIZE_OF, TIMES = [3], [2]


def other_shapes(value):
    return value[: SIZE_OF[0]].exp()


def other_tensors(value):
    for _ in range(TIMES[0]):
        value = value.exp()
    return value


@pytest.mark.parametrize(
    ("function", "change", "what"),
    [
        (other_shapes, lambda x: SIZE_OF.__setitem__(0, 2), "a tensor of 8 bytes instead of 12"),
        (other_tensors, lambda x: TIMES.__setitem__(0, 1), "2 tensors instead of 3"),
        (torch.exp, lambda x: x.detach().zero_(), "from an input that was changed in place"),
    ],
)
def test_what_differs_in_the_backward_pass_is_an_error(function, change, what):
    SIZE_OF[0], TIMES[0] = 3, 2
    hidden = torch.randn(4, requires_grad=True) * 1
    with pytest.raises(RunError) as error:
        backward_of(function, hidden, lambda: change(hidden))
    assert str(error.value) == (
        f"MS614 norms: a region recomputed {what}\n"
        "  fix: remove norms, or make the function compute the same values at each call with the same inputs"
    )
