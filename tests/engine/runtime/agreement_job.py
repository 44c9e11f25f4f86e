"""One rank of a tiny job: activates a plan and makes a gloo group. ``python agreement_job.py JSON``; prints what it meets."""

import json
import os
import sys
import time

import torch.distributed as dist

import mindspeed
from mindspeed.problems import MindSpeedError


def main() -> None:
    request = {"features": [], "settings": {}, "fail": "", "end": None, "group": True, "caught": True} | json.loads(sys.argv[1])
    plan = mindspeed.plan(request["features"], settings=request["settings"], platform="cuda", level=None)
    print(f"activating at {time.time()}", flush=True)
    try:
        mindspeed.activate(plan)
        if request["end"] is not None:
            os._exit(request["end"])
        if request["fail"]:
            raise OSError(request["fail"])
        if request["group"]:
            dist.init_process_group("gloo")
            dist.barrier()
    except MindSpeedError as error:
        if not request["caught"]:
            raise
        print(error)
        sys.exit(1)
    print(f"rank {os.environ['RANK']} is ready")


if __name__ == "__main__":
    main()
