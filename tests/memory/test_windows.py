from contextlib import nullcontext
from typing import Any

import pytest
import torch

from mindspeed.memory.windows import MainWeight, divide, step

SIZES = (7, 1, 40, 3, 3, 12, 5)


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


class CountedAdam(torch.optim.Adam):
    """Counts calls in its groups, as fused optimizers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
        super().step()


def optimizer_of(made: list[torch.nn.Parameter]) -> CountedAdam:
    return CountedAdam([{"params": made[:3], "weight_decay": 0.1}, {"params": made[3:], "lr": 0.5}])


def weights_of(optimizer: torch.optim.Optimizer) -> list[MainWeight]:
    groups = enumerate(optimizer.param_groups)
    return [MainWeight(parameter.data, None, index, optimizer) for index, group in groups for parameter in group["params"]]


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 100])
def test_a_window_has_its_share_and_at_most_the_largest_parameter_more(parts: int) -> None:
    windows = divide(weights_of(optimizer_of(parameters())), parts)
    sizes = [[weight.main.numel() for weight in window.weights] for window in windows]
    assert [size for window in sizes for size in window] == list(SIZES)
    assert max(map(sum, sizes)) <= sum(SIZES) / parts + max(SIZES)
    assert [window.following for window in windows] == [*windows[1:], None]


@pytest.mark.parametrize("parts", [1, 3, 100])
def test_steps_in_windows_give_the_bits_of_whole_steps_and_count_one_call(parts: int) -> None:
    whole, parted = parameters(), parameters()
    one, other = optimizer_of(whole), optimizer_of(parted)
    groups = enumerate(other.param_groups)
    weights = [MainWeight(p, None, index, other) for index, group in groups for p in group["params"]]
    for _ in range(3):
        one.step()
        step(other, divide(weights, parts), lambda window: nullcontext())
    assert all(torch.equal(left, right) for left, right in zip(whole, parted, strict=True))
    assert [group["step"] for group in other.param_groups] == [group["step"] for group in one.param_groups] == [3, 3]
    assert [len(group["params"]) for group in other.param_groups] == [3, 4]


def test_the_model_has_the_main_weights_of_a_window_when_it_ends() -> None:
    main = torch.nn.Parameter(torch.ones(4))
    main.grad = torch.ones(4)
    model = torch.ones(2, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([main], lr=0.25)
    step(optimizer, divide([MainWeight(main, model, 0, optimizer)], 1), lambda window: nullcontext())
    assert model.tolist() == [[0.75, 0.75], [0.75, 0.75]]
