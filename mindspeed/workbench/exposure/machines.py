"""Machines: how long kernels and transfers take, and which links a transfer occupies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from mindspeed.workbench.exposure.programs import Post


class Link(NamedTuple):
    """A link of a rank: bytes that it carries in a second, in each direction, and the seconds before the first one."""

    bytes_per_second: float
    latency: float = 0.0

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks in nodes of ``node`` ranks. Each has a link ``within`` its node, one ``between`` nodes and one to its host.

    ``flops`` are those that a rank computes in a second. ``source`` says where the numbers come from.
    """

    name: str
    node: int
    within: Link
    between: Link
    host: Link
    flops: float
    source: str = ""

    def link(self, rank: int, peer: int) -> str:
        """Return the kind of link between two ranks."""
        return "within" if rank // self.node == peer // self.node else "between"

    def message(self, size: float, rank: int, peer: int) -> float:
        """Return the seconds of a message."""
        link: Link = getattr(self, self.link(rank, peer))
        return link.seconds(size)

    def links_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the kinds of links of each rank of a collective."""
        if len(ranks) == 1:
            return ("host",)
        nodes = {rank // self.node for rank in ranks}
        return ("within",) * (len(nodes) < len(ranks)) + ("between",) * (len(nodes) > 1)

    def collective(self, post: Post) -> float:
        """Return the seconds of a collective, which sends no more than it must, over both kinds of links at a time.

        An all-gather fetches what other nodes have over the links of all ranks of a node, each byte once; in an all-to-all each
        rank sends to all ranks itself.
        """
        (part,), ranks = post.parts, post.ranks
        if len(ranks) == 1:
            return self.host.seconds(part.bytes)
        near = max(sum(rank // self.node == other // self.node for other in ranks) for rank in ranks)
        count = len(ranks)
        if "all_to_all" in post.name:
            amounts = {"within": part.bytes * (near - 1) / count, "between": part.bytes * (count - near) / count}
        else:
            times = 2 if "all_reduce" in post.name else 1
            amounts = {
                "within": times * part.bytes * (count - 1) / count,
                "between": times * part.bytes * (count - near) / count / near,
            }
        seconds: float = max(getattr(self, link).seconds(amounts[link]) for link in self.links_of(ranks))
        return seconds


_MFU: Final = 0.4
"""Share of the peak rate at which a rank computes."""
NODES: Final = Topology(
    "16 nodes of 8",
    8,
    Link(450e9, 10e-6),
    Link(50e9, 20e-6),
    Link(55e9, 10e-6),
    _MFU * 989e12,
    "8 accelerators per node with 450 GB/s among them and 50 GB/s (400 Gbit/s) each to other nodes; 989 TFLOP/s in bf16, "
    "of which 40 % are reached (NVIDIA DGX H100)",
)
SUPERNODE: Final = Topology(
    "supernode",
    768,
    Link(196e9, 10e-6),
    Link(25e9, 20e-6),
    Link(50e9, 10e-6),
    _MFU * 376e12,
    "one node of 768 dies with 196 GB/s each; 376 TFLOP/s in bf16, of which 40 % are reached (CloudMatrix384, arXiv "
    "2506.12708)",
)
PUBLISHED: Final = (NODES, SUPERNODE)
"""Machines for which pages state exposed times."""
