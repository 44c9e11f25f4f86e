from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from mindspeed.features.reuse_fp32_param.joined import joined
from mindspeed.features.swap_optimizer.swapped import Swapped
from mindspeed.memory.windows import MainWeight, OptimizerWindow, divide, step

SIZES = ((3, 5), (7,), (2, 2), (1,))


class Run:
    """An optimizer of bf16 weights with its main weights and states swapped, and residuals if ``residuals``."""

    def __init__(self, swapped: bool, residuals: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        mains = [torch.randn(size, generator=generator) for size in SIZES]
        self.optimizer = torch.optim.AdamW(mains, lr=0.1)
        self.weights = [MainWeight(main, main.bfloat16(), 0, self.optimizer) for main in mains]
        self.contexts = [*([Swapped().around] if swapped else []), *([joined] if residuals else [])]
        self.generator = generator
        if swapped:
            with self.around(OptimizerWindow(tuple(self.weights), "load")):
                pass

    @contextmanager
    def around(self, window: OptimizerWindow) -> Iterator[None]:
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context(window))
            yield

    def step(self) -> None:
        for weight in self.weights:
            weight.main.grad = torch.randn(weight.main.shape, generator=self.generator)
        step(self.optimizer, divide(self.weights, 3), self.around)

    def saved(self) -> list[Tensor]:
        """Main weights and states, as a checkpoint takes them."""
        with self.around(OptimizerWindow(tuple(self.weights), "save")):
            return [tensor.detach() for weight in self.weights for tensor in (weight.main, *weight.moments.values())]


def test_steps_with_swapped_states_give_the_bits_of_steps_without() -> None:
    stock, swapped, both = Run(False), Run(True), Run(True, residuals=True)
    for _ in range(4):
        for run in (stock, swapped, both):
            run.step()
    for run in (swapped, both):
        assert all(torch.equal(*pair) for pair in zip(stock.saved(), run.saved(), strict=True))
        assert all(torch.equal(left.weight, right.weight) for left, right in zip(stock.weights, run.weights, strict=True))


def test_nothing_of_a_main_weight_is_on_the_device_between_steps() -> None:
    run = Run(True)
    run.step()
    assert [weight.main.untyped_storage().nbytes() for weight in run.weights] == [0] * len(SIZES)


def test_what_a_checkpoint_keeps_is_not_what_the_next_step_writes() -> None:
    for residuals in (False, True):
        run = Run(True, residuals)
        run.step()
        kept = run.saved()
        before = [tensor.clone() for tensor in kept]
        run.step()
        assert all(torch.equal(*pair) for pair in zip(kept, before, strict=True))


def test_what_a_checkpoint_loads_is_what_the_next_step_begins_with() -> None:
    for residuals in (False, True):
        first, second = Run(True, residuals), Run(True, residuals)
        for _ in range(2):
            first.step()
        with second.around(OptimizerWindow(tuple(second.weights), "load")):
            for weight, value in zip(second.weights, first.weights, strict=True):
                with first.around(OptimizerWindow(tuple(first.weights), "save")):
                    weight.main.copy_(value.main)
                    state = {name: v.clone() for name, v in first.optimizer.state[value.main].items()}
                second.optimizer.state[weight.main] = state
        second.generator = torch.Generator().set_state(first.generator.get_state())
        first.step()
        second.step()
        assert all(torch.equal(*pair) for pair in zip(first.saved(), second.saved(), strict=True))


def test_a_window_its_neighbours_and_no_others_are_on_the_device() -> None:
    run = Run(True)
    run.step()
    seen: list[tuple[int, ...]] = []

    @contextmanager
    def watched(window: OptimizerWindow) -> Iterator[None]:
        seen.append(tuple(i for i, weight in enumerate(run.weights) if weight.main.untyped_storage().nbytes()))
        yield

    run.contexts.append(watched)
    run.step()
    assert seen == [(0, 1, 2), (0, 1, 2, 3), (1, 2, 3)]  # windows of 15, 7 + 4 and 1 elements
