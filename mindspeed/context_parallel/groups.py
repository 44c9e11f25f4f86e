"""Process groups of hybrid algorithms: head all-to-alls within a node, another algorithm across nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from mindspeed.context_parallel.communicators import INNER_GROUP, OUTER_GROUP
from mindspeed.ops.errors import OperatorError
from mindspeed.problems import Fix, Problem


@dataclass(frozen=True, slots=True)
class Groups:
    """The neighbours of this rank in the head all-to-all, and the ranks with the same place among theirs."""

    inner: dist.ProcessGroup
    outer: dist.ProcessGroup

    def destroy(self) -> None:
        """Destroy both groups, before Megatron destroys its groups."""
        dist.destroy_process_group(self.inner)
        dist.destroy_process_group(self.outer)


def make_groups(cp_group: dist.ProcessGroup, degree: int) -> Groups:
    """Split the context-parallel group of this rank into groups of ``degree`` neighbours; every rank of it calls this."""
    ranks, mine = dist.get_process_group_ranks(cp_group), cp_group.rank()
    first = mine // degree * degree
    return Groups(
        group_of_ranks(ranks[first : first + degree], INNER_GROUP), group_of_ranks(ranks[mine % degree :: degree], OUTER_GROUP)
    )


def group_of_ranks(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """Create a group; each of its ranks calls this, and no other."""
    created: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name)
    return created


def make_ring_groups(ring: dist.ProcessGroup, names: Iterable[str]) -> dict[str, dist.ProcessGroup]:
    """Create a further group of the ranks of a ring for each name of `communicators_of_ring`; each of them calls this."""
    return {name: group_of_ranks(dist.get_process_group_ranks(ring), name) for name in names}


def destroy(groups: Mapping[str, dist.ProcessGroup]) -> Mapping[str, dist.ProcessGroup]:
    """Destroy groups, before Megatron destroys its groups. None is left."""
    for group in groups.values():
        dist.destroy_process_group(group)
    return {}


def require_groups(groups: Groups | None, op: str) -> Groups:
    """Give the groups of this rank. Raises OperatorError, in the name of ``op``, when there are none."""
    if groups is None:
        text = f"{op}: Megatron's process groups do not exist"
        raise OperatorError(
            [Problem("MS505", text, fix=Fix.advise("call initialize_model_parallel before building the model"))]
        )
    return groups
