"""Runs `plain_script` once per case in one process group; prints ``{case: losses}`` as JSON on the last rank.

Its one argument is a JSON object ``{case: [flag, ...]}``. Starting processes costs more than all the cases.
"""

import json
import os
import sys

import torch
from plain_script import parse, run


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    losses = {name: run(parse(flags))[0] for name, flags in json.loads(sys.argv[1]).items()}
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(json.dumps(losses), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
