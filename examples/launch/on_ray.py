"""Start a job of mindspeed on the nodes of a Ray cluster.

    python examples/launch/on_ray.py --ranks 2 -- pretrain --tp 2 --train-iters 10 --run runs/on-ray

Each rank is an actor, which Ray places. It starts `mindspeed` with the variables that torchrun would set,
and mindspeed joins the job.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="devices of each rank that Ray reserves")
    parser.add_argument("words", nargs="+", help="words after `mindspeed`")
    options = parser.parse_args()
    ray.init()
    ranks = [Rank.options(num_cpus=1, num_gpus=options.gpus).remote() for _ in range(options.ranks)]
    places = ray.get([rank.address.remote() for rank in ranks])
    nodes = [node for node, _ in places]
    running = []
    for number, rank in enumerate(ranks):
        variables = {
            "MASTER_ADDR": places[0][0],
            "MASTER_PORT": str(places[0][1]),
            "WORLD_SIZE": str(options.ranks),
            "RANK": str(number),
            "LOCAL_RANK": str(nodes[:number].count(nodes[number])),
            "LOCAL_WORLD_SIZE": str(nodes.count(nodes[number])),
        }
        running.append(rank.run.remote(options.words, variables))
    sys.exit(max(ray.get(running)))


if __name__ == "__main__":
    main()
