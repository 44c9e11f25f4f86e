"""Start a job of mindspeed on the nodes of a Ray cluster.

    python examples/launch/on_ray.py --ranks 2 -- pretrain --tp 2 --train-iters 10 --auto-resume runs/on-ray

Each rank is an actor, which Ray places. It starts `mindspeed` with the variables that torchrun would set,
and mindspeed joins the job. When a rank fails, its number is printed and all ranks start again, at most `--retries` times:
give the run as `--auto-resume RUN`, so that it continues from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

import ray


@ray.remote
class Rank:
    """One process of the job, on the node where Ray has placed it."""

    def address(self) -> tuple[str, int]:
        """Return the address of this node and a free port."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return ray.util.get_node_ip_address(), listener.getsockname()[1]

    def run(self, words: list[str], variables: dict[str, str]) -> int:
        """Run `mindspeed WORDS` and return its exit status."""
        return subprocess.run([sys.executable, "-m", "mindspeed", *words], env=os.environ | variables, check=False).returncode


def start(options: argparse.Namespace) -> int:
    """Run all ranks once. Returns 0, or the exit status of the first rank that failed, whose number it prints."""
    ranks = [Rank.options(num_cpus=1, num_gpus=options.gpus).remote() for _ in range(options.ranks)]
    places = ray.get([rank.address.remote() for rank in ranks])
    nodes = [node for node, _ in places]
    running = {}
    for number, rank in enumerate(ranks):
        variables = {
            "MASTER_ADDR": places[0][0],
            "MASTER_PORT": str(places[0][1]),
            "WORLD_SIZE": str(options.ranks),
            "RANK": str(number),
            "LOCAL_RANK": str(nodes[:number].count(nodes[number])),
            "LOCAL_WORLD_SIZE": str(nodes.count(nodes[number])),
            "TORCHELASTIC_RUN_ID": "on-ray",  # ranks end with the process that started them
        }
        running[rank.run.remote(options.words, variables)] = number
    while running:
        ended, _ = ray.wait(list(running))
        number = running.pop(ended[0])
        try:
            status = ray.get(ended[0])
        except ray.exceptions.RayError:  # the node is lost
            status = 1
        if status:
            print(f"rank {number} on {nodes[number]} failed with exit status {status}", file=sys.stderr, flush=True)
            for rank in ranks:
                ray.kill(rank)
            return status
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="devices of each rank that Ray reserves")
    parser.add_argument("--retries", type=int, default=0, help="times that the ranks start again after a failure")
    parser.add_argument("words", nargs="+", help="words after `mindspeed`")
    options = parser.parse_args()
    ray.init()
    for _ in range(options.retries + 1):
        if (status := start(options)) == 0:
            break
    sys.exit(status)


if __name__ == "__main__":
    main()
