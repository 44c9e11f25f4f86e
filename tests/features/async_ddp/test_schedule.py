from types import SimpleNamespace

import torch
from megatron.core.distributed import DistributedDataParallel

from mindspeed.features.async_ddp.feature import held_back_reduction


def reducing_chunk(config):
    """A chunk that reduces its gradients, without the process groups that a real one needs."""
    chunk = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(chunk)
    chunk.config = config
    return chunk


def no_sync_during_pass(*chunks):
    """The ``no_sync_func`` that a schedule sees."""
    with held_back_reduction(chunks):
        return chunks[0].config.no_sync_func


def test_a_schedule_holds_reduction_back_although_the_script_did_not_ask():
    chunk = reducing_chunk(SimpleNamespace(no_sync_func=None))
    assert no_sync_during_pass(chunk) == chunk.no_sync
    assert chunk.config.no_sync_func is None, "Megatron-LM refuses one that is already there"


def test_every_chunk_of_a_virtual_pipeline_is_held_back():
    config = SimpleNamespace(no_sync_func=None)
    chunks = [reducing_chunk(config), reducing_chunk(config)]
    assert no_sync_during_pass(*chunks) == [chunk.no_sync for chunk in chunks]


def test_what_the_script_set_stays():
    config = SimpleNamespace(no_sync_func="the script's")
    assert no_sync_during_pass(reducing_chunk(config)) == "the script's"


def test_a_model_that_does_not_reduce_is_left_alone():
    module = torch.nn.Linear(1, 1)
    module.config = SimpleNamespace(no_sync_func=None)
    assert no_sync_during_pass(module) is None
