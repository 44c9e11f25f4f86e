"""Process groups of hybrid algorithms: head all-to-alls within a node, another algorithm across nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

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
    named = {"HYBRID_INNER_GROUP": ranks[first : first + degree], "HYBRID_OUTER_GROUP": ranks[mine % degree :: degree]}
    return Groups(*(dist.new_group(part, use_local_synchronization=True, group_desc=name) for name, part in named.items()))


def require_groups(groups: Groups | None, op: str) -> Groups:
    """Give the groups of this rank. Raises OperatorError, in the name of ``op``, when there are none."""
    if groups is None:
        text = f"{op}: Megatron's process groups do not exist"
        raise OperatorError(
            [Problem("MS505", text, fix=Fix.advise("call initialize_model_parallel before building the model"))]
        )
    return groups
