from __future__ import annotations

from types import SimpleNamespace

import torch
from megatron.core.distributed import DistributedDataParallel

from mindspeed.features.async_ddp.schedule import with_no_sync


def reducing_chunk(config):
    """A chunk that reduces its gradients, without the process groups that a real one needs."""
    chunk = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(chunk)
    chunk.config = config
    return chunk


def run_step(model):
    """What a step returns, and the ``no_sync_func`` that its schedule saw."""
    chunk = model[0] if isinstance(model, list) else model

    def schedule(**arguments):
        return arguments["num_microbatches"], chunk.config.no_sync_func

    return with_no_sync(lambda: schedule)()(model=model, num_microbatches=2)


def test_a_schedule_holds_reduction_back_although_the_script_did_not_ask():
    chunk = reducing_chunk(SimpleNamespace(no_sync_func=None))
    assert run_step(chunk) == (2, chunk.no_sync)


def test_every_chunk_of_a_virtual_pipeline_is_held_back():
    config = SimpleNamespace(no_sync_func=None)
    chunks = [reducing_chunk(config), reducing_chunk(config)]
    assert run_step(chunks) == (2, [chunk.no_sync for chunk in chunks])


def test_what_the_script_set_stays():
    config = SimpleNamespace(no_sync_func="the script's")
    assert run_step([reducing_chunk(config)]) == (2, "the script's")


def test_a_model_that_does_not_reduce_is_left_alone():
    module = torch.nn.Linear(1, 1)
    module.config = SimpleNamespace(no_sync_func=None)
    assert run_step(module) == (2, None)
