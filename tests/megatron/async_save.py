"""Saves asynchronously while training would go on: what is written are the values of the moment of saving.

Arguments: a folder, and ``persistent`` for writers that Megatron spawns instead of forking.
"""

import json
import os
import sys

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue


def main():
    folder, kind = sys.argv[1:]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    weight = torch.full((1 << 20,), 1.0, device="cuda")
    os.makedirs(folder)
    queue = AsyncCallsQueue(persistent=kind == "persistent")
    state = {"weight": ShardedTensor.from_rank_offsets("weight", weight)}
    queue.schedule_async_request(dist_checkpointing.save(state, folder, async_sharded_save=True))
    weight.fill_(-1.0)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    loaded = dist_checkpointing.load({"weight": ShardedTensor.from_rank_offsets("weight", torch.empty_like(weight))}, folder)
    print(json.dumps(loaded["weight"].unique().tolist()), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
