"""Wrappers of torch optimizers: the results of the wrapped one bit for bit, and memory elsewhere between steps."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mindspeed.ops.errors import OperatorError
from mindspeed.optim import ReuseFp32Param, SwapOptimizer

Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}
WRAPPERS: dict[str, Callable[[Optimizer], Optimizer]] = {
    "swap": lambda optimizer: SwapOptimizer(optimizer, parts=3),
    "reuse": lambda optimizer: ReuseFp32Param(optimizer, parts=2),
    "both": lambda optimizer: SwapOptimizer(ReuseFp32Param(optimizer), parts=3),
}


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4)).to(dtype)


def groups(net: nn.Module) -> list[dict[str, Any]]:
    first, *rest = net.parameters()
    return [{"params": [first], "lr": 0.01}, {"params": rest}]


def reference(make: Make, steps: int) -> list[Tensor]:
    """Weights of a bf16 model whose fp32 main weights a plain optimizer updates."""
    net = model(torch.bfloat16)
    mains = [parameter.detach().float().requires_grad_() for parameter in net.parameters()]
    optimizer = make([{"params": mains[:1], "lr": 0.01}, {"params": mains[1:]}])
    for step in range(steps):
        net.zero_grad()
        backward(net, step)
        for main, parameter in zip(mains, net.parameters(), strict=True):
            main.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for main, parameter in zip(mains, net.parameters(), strict=True):
                parameter.copy_(main)
    return [parameter.detach() for parameter in net.parameters()]


def backward(net: nn.Module, step: int) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
    net(x.to(next(net.parameters()).dtype)).square().mean().backward()


def train(net: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()


def equal(net: nn.Module, expected: list[Tensor]) -> bool:
    return all(torch.equal(own, other) for own, other in zip(net.parameters(), expected, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_in_fp32_is_trained_as_by_the_wrapped_optimizer(name: str) -> None:
    nets = [model(torch.float32) for _ in range(2)]
    train(nets[0], OPTIMIZERS[name](groups(nets[0])), range(4))
    train(nets[1], SwapOptimizer(OPTIMIZERS[name](groups(nets[1])), parts=3), range(4))
    assert equal(nets[1], list(nets[0].parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_model_in_bf16_has_main_weights(name: str, wrapper: str) -> None:
    net = model(torch.bfloat16)
    train(net, WRAPPERS[wrapper](OPTIMIZERS[name](groups(net))), range(4))
    assert equal(net, reference(OPTIMIZERS[name], 4))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_run_continues_from_its_state(wrapper: str) -> None:
    make = OPTIMIZERS["adamw"]
    net = model(torch.bfloat16)
    optimizer = WRAPPERS[wrapper](make(groups(net)))
    train(net, optimizer, range(2))
    saved, weights = copy.deepcopy((optimizer.state_dict(), net.state_dict()))  # torch's are aliases
    train(net, optimizer, range(2, 4))
    again = model(torch.bfloat16)
    again.load_state_dict(weights)
    resumed = WRAPPERS[wrapper](make(groups(again)))
    resumed.load_state_dict(saved)
    train(again, resumed, range(2, 4))
    assert equal(again, list(net.parameters()))
    assert equal(net, reference(make, 4))


def test_state_of_the_wrapped_optimizer_is_read_and_written() -> None:
    net, other = model(torch.float32), model(torch.float32)
    plain, wrapped = torch.optim.AdamW(net.parameters()), SwapOptimizer(torch.optim.AdamW(other.parameters()))
    train(net, plain, range(2))
    other.load_state_dict(net.state_dict())
    wrapped.load_state_dict(copy.deepcopy(plain.state_dict()))
    for run in ((net, plain), (other, wrapped)):
        train(*run, range(2, 4))
    assert equal(other, list(net.parameters()))
    states = [optimizer.state_dict() for optimizer in (plain, wrapped)]
    torch.testing.assert_close(states[1]["state"], states[0]["state"], rtol=0, atol=0)
    assert states[1]["param_groups"] == states[0]["param_groups"]


def test_main_weights_are_away_between_steps() -> None:
    net = model(torch.bfloat16)
    for wrap in WRAPPERS.values():
        optimizer: Any = wrap(torch.optim.AdamW(net.parameters()))
        train(net, optimizer, range(2))
        assert [member.main.untyped_storage().nbytes() for member in optimizer._managed.weights] == [0] * 6


def test_scheduler_and_clipping_work_as_with_any_optimizer() -> None:
    nets = [model(torch.float32) for _ in range(2)]
    optimizers = [
        torch.optim.AdamW(nets[0].parameters(), lr=0.1),
        SwapOptimizer(torch.optim.AdamW(nets[1].parameters(), lr=0.1)),
    ]
    for net, optimizer in zip(nets, optimizers, strict=True):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        for step in range(3):
            optimizer.zero_grad()
            backward(net, step)
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            optimizer.step()
            scheduler.step()
    assert equal(nets[1], list(nets[0].parameters()))
    assert optimizers[1].param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"] < 0.1


def test_parameters_without_gradients_stay_as_they_are() -> None:
    net = model(torch.bfloat16)
    optimizer = SwapOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    assert optimizer.step(lambda: 3.0) == 3.0
    assert equal(net, before)


@pytest.mark.parametrize(
    ("call", "sentence", "fix"),
    [
        (
            lambda: ReuseFp32Param(torch.optim.SGD(model(torch.float32).parameters())),
            "reuse-fp32-param: the parameters are float32, but bf16 ones are needed",
            "convert the model to bf16",
        ),
        (
            lambda: SwapOptimizer(torch.optim.SGD(model(torch.float32).parameters()), parts=0),
            "swap-optimizer: parts is 0",
            "pass parts=1 or more",
        ),
        (
            lambda: SwapOptimizer(torch.optim.SGD(model(torch.float32).parameters())).add_param_group({"params": []}),
            "a wrapped optimizer cannot get further parameters",
            "add them before the optimizer is wrapped",
        ),
    ],
)
def test_wrong_use_is_one_error(call: Callable[[], Any], sentence: str, fix: str) -> None:
    with pytest.raises(OperatorError) as error:
        call()
    (problem,) = error.value.problems
    assert (problem.code, problem.message, problem.fix_text) == ("MS505", sentence, fix)
