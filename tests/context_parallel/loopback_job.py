"""Run in a network namespace of its own: prints what each algorithm sends over the loopback interface, and must send."""

import fcntl
import json
import socket
import struct
import sys
from pathlib import Path

import torch

import mindspeed
from mindspeed.context_parallel import costs
from mindspeed.workbench.verification.pool import WorkerPool
from tests.context_parallel.algorithms import algorithms
from tests.context_parallel.shards import made
from tests.context_parallel.watched import on_the_wire

TOKENS, HEADS, WIDTH = 512, 8, 64
_SET_FLAGS, _UP = 0x8914, 0x1


def on_loopback() -> int:
    """Bytes that the interface has sent, headers included."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.partition(":")[2].split()[8])


def interface_up() -> None:
    """What ``ip link set lo up`` does; a new namespace has nothing else, so nobody else's traffic is counted."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))


def sent(world: int) -> dict[str, int]:
    """The least of four: what a full buffer drops is sent again, and a busy machine has full buffers."""
    tensors = made(world * TOKENS, 1, HEADS, HEADS, WIDTH, WIDTH, torch.float32)
    runs = [on_the_wire(algorithms(world), tensors, on_loopback) for _ in range(4)]
    return {name: min(run[name] for run in runs) for name in runs[0]}


def main(world: int) -> None:
    interface_up()
    a = costs.Attention(TOKENS, HEADS, HEADS, WIDTH, WIDTH, 4)
    with WorkerPool(search_path=[str(Path(__file__).parents[2])]) as pool:
        first, *_ = pool.call(sent, world, world, plan=mindspeed.plan(features=[], platform="cpu"))
    needed = {name: sum(one.sent(a, world, rank).both for rank in range(world)) for name, one in algorithms(world).items()}
    json.dump({name: [needed[name], first[name]] for name in needed}, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
