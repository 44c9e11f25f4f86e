"""The exchange of sequence and heads around a gated delta net, for Megatron releases that do not have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def tensor_a2a_cp2hp(
    tensor: Tensor,
    seq_dim: int,
    head_dim: int,
    cp_group: Any,
    split_sections: Sequence[int] | None = None,
    undo_attention_load_balancing: bool = True,
) -> Tensor:
    """Give every rank the whole sequence of its part of the heads; ``tensor`` is [sequence / ranks, batch, heads].

    Each of ``split_sections`` is split over the ranks on its own. The load-balanced order of the sequence is undone.
    """
    if cp_group.size() == 1:
        return tensor
    from megatron.core.ssm import mamba_context_parallel as exchanges

    parts = torch.split(tensor, list(split_sections), dim=head_dim) if split_sections is not None else (tensor,)
    tensor = torch.cat([exchanges._all_to_all_cp2hp(part, cp_group) for part in parts], dim=head_dim)
    if undo_attention_load_balancing:
        tensor = exchanges._undo_attention_load_balancing(tensor, cp_group.size())
    return tensor


def tensor_a2a_hp2cp(
    tensor: Tensor,
    seq_dim: int,
    head_dim: int,
    cp_group: Any,
    split_sections: Sequence[int] | None = None,
    redo_attention_load_balancing: bool = True,
) -> Tensor:
    """Undo `tensor_a2a_cp2hp`."""
    if cp_group.size() == 1:
        return tensor
    from megatron.core.ssm import mamba_context_parallel as exchanges

    if redo_attention_load_balancing:
        tensor = exchanges._redo_attention_load_balancing(tensor, cp_group.size())
    parts = torch.split(tensor, list(split_sections), dim=head_dim) if split_sections is not None else (tensor,)
    return torch.cat([exchanges._all_to_all_hp2cp(part, cp_group) for part in parts], dim=head_dim)
