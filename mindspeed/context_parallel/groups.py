"""The two kinds of groups that the context-parallel ranks are cut into where heads are traded among near ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from mindspeed.ops.errors import require


@dataclass(frozen=True, slots=True)
class Groups:
    """The neighbours of this rank that trade heads, and the ranks that have the same place among theirs."""

    inner: dist.ProcessGroup
    outer: dist.ProcessGroup


_made: list[Groups] = []


def make_groups(cp_group: dist.ProcessGroup, degree: int) -> None:
    """Cut the context-parallel group of this rank; called by every rank of it."""
    ranks, mine = dist.get_process_group_ranks(cp_group), cp_group.rank()
    first = mine // degree * degree
    named = {"HYBRID_INNER_GROUP": ranks[first : first + degree], "HYBRID_OUTER_GROUP": ranks[mine % degree :: degree]}
    groups = [dist.new_group(part, use_local_synchronization=True, group_desc=name) for name, part in named.items()]
    _made[:] = [Groups(*groups)]


def forget_groups() -> None:
    """Megatron's groups are about to go, and these with them."""
    for groups in _made:
        dist.destroy_process_group(groups.inner)
        dist.destroy_process_group(groups.outer)
    _made.clear()


def made_groups(op: str) -> Groups:
    """The groups of this rank; ``op`` is who asks. Raises OperatorError when there are none."""
    require(bool(_made), op, "Megatron's groups do not exist: initialize_model_parallel comes before the model")
    return _made[0]
