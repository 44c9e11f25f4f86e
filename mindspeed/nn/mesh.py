"""The process group of a module: given as such, or as a `DeviceMesh` of one dimension."""

from __future__ import annotations

from typing import TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mindspeed.ops.errors import refuse

Mesh: TypeAlias = DeviceMesh | dist.ProcessGroup


def group_of(mesh: Mesh, module: str) -> dist.ProcessGroup:
    """Return the process group of a mesh. Raises OperatorError for a mesh of several dimensions."""
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        example = f'mesh["{names[-1]}"]' if names else "DeviceMesh(..., mesh_dim_names=(...)) and one of its names"
        refuse(f"{module}: the mesh has {mesh.ndim} dimensions {names}, but 1 is needed", f"pass {example}")
    return mesh.get_group()


def share_of(size: int, count: int, module: str, what: str, among: str = "ranks") -> int:
    """Return an equal share of a size. Raises OperatorError, with the sizes that would do."""
    if size % count:
        below = size // count * count
        near = f"{below} or {below + count}" if below else str(count)
        refuse(f"{module}: {size} {what} are not divisible by {count} {among}", f"use {near} {what}, or fewer {among}")
    return size // count
