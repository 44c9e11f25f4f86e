"""Torch's Adam on the CPU platform: one kernel, with the updates and the checkpoints of stock torch."""

import copy

import pytest
import torch

import mindspeed

SHAPES = ((64, 32), (37, 5), (16,), (0,), ())


def trained(kind, steps, **kwargs):
    """Return an optimizer after steps with drawn gradients."""
    draws = torch.Generator().manual_seed(5)

    def draw(shape):
        return torch.randn(shape, generator=draws)

    parameters = [torch.nn.Parameter(draw(shape)) for shape in SHAPES]
    optimizer = kind(parameters, lr=1e-2, weight_decay=0.1, **kwargs)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = draw(parameter.shape)
        optimizer.step()
    return optimizer


def kernels_of(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key for event in profile.key_averages()} & {"aten::_fused_adam_", "aten::_fused_adamw_"}


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_updates_are_within_two_roundings_of_the_kernels_for_each_term(on_cpu, kind, amsgrad):
    fused, stock = (trained(kind, 12, amsgrad=amsgrad, foreach=foreach) for foreach in (None, False))
    for one, other in zip(fused.param_groups[0]["params"], stock.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(one, other, rtol=2.4e-7, atol=2.4e-7)
        assert fused.state[one]["step"] == stock.state[other]["step"] == 12
        torch.testing.assert_close(fused.state[one]["exp_avg"], stock.state[other]["exp_avg"], rtol=2.4e-7, atol=2.4e-7)
        torch.testing.assert_close(fused.state[one]["exp_avg_sq"], stock.state[other]["exp_avg_sq"], rtol=2.4e-7, atol=0)


def test_a_step_is_one_kernel_unless_another_implementation_is_named(on_cpu):
    assert kernels_of(lambda: trained(torch.optim.AdamW, 1)) == {"aten::_fused_adamw_"}
    assert kernels_of(lambda: trained(torch.optim.Adam, 1)) == {"aten::_fused_adam_"}
    for named in ({"foreach": True}, {"foreach": False}, {"fused": False}):
        assert kernels_of(lambda named=named: trained(torch.optim.AdamW, 1, **named)) == set()


def test_whole_numbers_of_steps_are_left_to_stock_torch(on_cpu):
    optimizer = trained(torch.optim.AdamW, 1)
    for state in optimizer.state.values():
        state["step"] = state["step"].long()
    assert kernels_of(optimizer.step) == set()


def test_what_stock_torch_refuses_on_a_processor_is_refused(on_cpu):
    with pytest.raises(AssertionError, match="capturable"):
        trained(torch.optim.AdamW, 1, capturable=True)


def test_the_choice_ends_with_the_plan(on_cpu):
    mindspeed.deactivate()
    try:
        assert kernels_of(lambda: trained(torch.optim.AdamW, 1)) == set()
    finally:
        mindspeed.activate(mindspeed.plan(platform="cpu"))


@pytest.mark.parametrize("what", ["transposed", "complex"])
def test_tensors_that_the_kernel_lacks_are_updated_as_without_it(on_cpu, what):
    """The kernel would read a transposed tensor in the order of its memory, without an error."""

    def stepped(foreach):
        start = torch.arange(12.0).view(3, 4) + 1
        parameter = torch.nn.Parameter(start.t() if what == "transposed" else start)
        if what == "complex":
            parameter = torch.nn.Parameter(torch.complex(start, start))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, foreach=foreach)
        for number in range(3):
            parameter.grad = (torch.arange(12.0) - number).view(parameter.shape).to(parameter.dtype)
            optimizer.step()
        return parameter

    assert torch.equal(stepped(None), stepped(False))


def test_a_checkpoint_is_that_of_stock_torch_and_resumes_either_way(on_cpu):
    optimizer = trained(torch.optim.AdamW, 3)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["fused"] is None
    assert {name for state in saved["state"].values() for name in state} == {"step", "exp_avg", "exp_avg_sq"}
    assert all(isinstance(state["step"], torch.Tensor) for state in saved["state"].values())

    def resumed(foreach):
        parameters = [torch.nn.Parameter(one.detach().clone()) for one in optimizer.param_groups[0]["params"]]
        other = torch.optim.AdamW(parameters)
        other.load_state_dict(copy.deepcopy(saved))
        other.param_groups[0]["foreach"] = foreach
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        other.step()
        return parameters

    for one, other in zip(resumed(None), resumed(False), strict=True):
        torch.testing.assert_close(one, other, rtol=2.4e-7, atol=2.4e-7)
