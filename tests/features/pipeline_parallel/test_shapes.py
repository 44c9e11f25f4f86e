from types import SimpleNamespace

import pytest
import torch

from mindspeed.features.pipeline_parallel.shapes import with_checked_shapes
from mindspeed.plugins import MindSpeedError

LONG, SHORT = torch.zeros(6, 1, 4), torch.zeros(4, 1, 4)


class Communicator:
    def __init__(self, **config):
        self.config = SimpleNamespace(**{"variable_seq_lengths": False, "mtp_standalone": False} | config)
        self.passed = 0

    def _communicate(self, **given):
        self.passed += 1
        return given["tensor_send_next"]

    communicate = with_checked_shapes(_communicate)

    def exchange(self, send_next=None, send_prev=None, shape=None):
        return self.communicate(
            tensor_send_next=send_next,
            tensor_send_prev=send_prev,
            recv_prev=False,
            recv_next=shape is not None,
            tensor_shape=shape,
        )


def test_tensors_of_the_expected_shape_are_sent():
    stage = Communicator()
    assert stage.exchange(send_next=LONG) is LONG
    stage.exchange(send_next=LONG, shape=[6, 1, 4])
    stage.exchange(send_prev=LONG)
    assert stage.passed == 3


def test_a_shorter_tensor_is_refused_before_it_is_sent():
    stage = Communicator()
    stage.exchange(shape=(6, 1, 4))
    with pytest.raises(MindSpeedError) as refused:
        stage.exchange(send_prev=SHORT)
    problem = refused.value.problems[0]
    assert problem.code == "MS645"
    assert problem.message == (
        "pipeline-parallel: a stage sends a tensor of shape (4, 1, 4), but its neighbour expects (6, 1, 4)"
    )
    assert problem.fix_text == "add dynamic-shapes, or give all micro-batches the same length"
    assert stage.passed == 1


def test_what_was_sent_before_the_shape_is_known_is_refused_then():
    stage = Communicator()
    stage.exchange(send_next=SHORT)
    with pytest.raises(MindSpeedError, match="sends a tensor of shape"):
        stage.exchange(shape=(6, 1, 4))


@pytest.mark.parametrize("argument", ["variable_seq_lengths", "mtp_standalone"])
def test_where_shapes_are_exchanged_any_shape_is_sent(argument):
    stage = Communicator(**{argument: True})
    stage.exchange(shape=(6, 1, 4))
    assert stage.exchange(send_next=SHORT) is SHORT
