"""A loop of one's own marks its steps, and the report counts what ran in them."""

import pytest
import torch

import mindspeed
from mindspeed.ops import swiglu

pytestmark = pytest.mark.usefixtures("small_heap")


@pytest.fixture
def active():
    mindspeed.activate(mindspeed.plan(["swiglu"], platform="cpu"))
    yield
    mindspeed.deactivate()


def operators():
    return [
        (point.name, point.calls, point.state)
        for point in next(f for f in mindspeed.report().features if f.name == "swiglu").points
        if point.kind == "op"
    ]


def train_step():
    swiglu(torch.ones(2, 4), -1)


@pytest.mark.long
def test_an_operator_is_counted_in_the_steps_that_a_loop_marks(active):
    train_step()
    assert operators() == [("swiglu", 0, "not yet due")]
    for _ in range(5):
        with mindspeed.step():
            train_step()
    assert operators() == [("swiglu", 1, "reached")]


def test_an_operator_that_no_step_calls_is_told_when_the_first_one_has_ended(active, capsys):
    with mindspeed.step():
        pass
    assert operators() == [("swiglu", 0, "never reached")]


def test_a_step_that_fails_has_not_ended(active):
    with pytest.raises(ValueError, match="no batch"), mindspeed.step():
        raise ValueError("no batch")
    assert operators() == [("swiglu", 0, "not yet due")]


def test_without_a_plan_a_step_does_nothing():
    with mindspeed.step():
        pass
    assert mindspeed.report() is None
