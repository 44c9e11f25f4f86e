"""Attention over a sequence that is split over the ranks of a group: every algorithm behind one module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed.context_parallel.costs import Keep
from mindspeed.context_parallel.groups import make_groups
from mindspeed.context_parallel.heads import own_heads
from mindspeed.context_parallel.layout import Layout, contiguous, nested, zigzag
from mindspeed.context_parallel.mask_rules import MaskRule
from mindspeed.context_parallel.ring import ring_attention
from mindspeed.features.adaptive_cp.attention import AdaptivePlan, adaptive_attention, plan_mask
from mindspeed.features.adaptive_cp.masks import RuleMask
from mindspeed.features.hybrid_attention.attention import hybrid_attention
from mindspeed.features.kv_allgather_cp.attention import kv_allgather_attention
from mindspeed.features.ulysses_attention.attention import ulysses_attention
from mindspeed.nn.mesh import Mesh, group_of, share_of
from mindspeed.ops.autocast import in_autocast_type
from mindspeed.ops.errors import refuse
from mindspeed.ops.process_groups import group_of_name, name_of

Algorithm: TypeAlias = Literal["ring", "ulysses", "hybrid", "kv-allgather", "adaptive"]
ALGORITHMS: Final[tuple[str, ...]] = get_args(Algorithm)
_KEEPING: Final = ("ring", "ulysses", "hybrid")
"""Algorithms with a choice of what backward finds and what it receives again."""


class ContextParallelAttention(nn.Module):
    """Exact attention of tokens that are split over ranks. It has no parameters; every rank of the group calls it.

    ``mesh`` is a `DeviceMesh` of one dimension or a process group. ``algorithm`` is one of

    - ring: key and value blocks travel around a ring (Liu et al., arXiv 2310.01889); any number of heads;
    - ulysses: all-to-alls exchange tokens for heads (Jacobs et al., arXiv 2309.14509); the ranks divide the query heads;
    - hybrid: Ulysses among ``inner`` neighbouring ranks, a ring of these (Fang and Zhao, arXiv 2405.07719). ``mesh`` may then
      have two dimensions, the ring and its neighbours;
    - kv-allgather: all keys and values on every rank (Dubey et al., arXiv 2407.21783);
    - adaptive: only blocks that the mask does not hide are sent and computed. ``mask`` [tokens, tokens] is True where hidden,
      without it the mask is causal.

    Each algorithm needs its own tokens on a rank: `shard` takes them from a batch, `positions` numbers them for a rotary
    embedding, and `unshard` restores the sequence. Every rank has equally many tokens, so that the mean of the ranks' mean
    losses is the mean over all tokens.

    ``keep`` names what ring and Ulysses attention keep for backward instead of receiving it again: none, half (keys) or full.
    ``dropout`` is applied in training alone; ranks drop different places. Copies and pickles find the group by its name.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        algorithm: Algorithm = "ring",
        causal: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
        keep: Keep = "none",
        inner: int | None = None,
        mask: Tensor | None = None,
    ) -> None:
        super().__init__()
        if algorithm not in ALGORITHMS:
            refuse(f"ContextParallelAttention: no algorithm {algorithm!r}", f"use one of {', '.join(ALGORITHMS)}")
        unused = {"keep": keep != "none" and algorithm not in _KEEPING, "mask": mask is not None and algorithm != "adaptive"}
        unused |= {"inner": inner is not None and algorithm != "hybrid"}
        unused |= {"causal": not causal and algorithm == "adaptive"}
        for name in (name for name, wrong in unused.items() if wrong):
            refuse(f"ContextParallelAttention: algorithm {algorithm} cannot use this {name}", f"remove {name}")
        if not 0 <= dropout < 1:
            refuse(f"ContextParallelAttention: dropout is {dropout}", "give a dropout from 0 to below 1")
        self.algorithm, self.causal, self.dropout, self.scale, self.keep = algorithm, causal, dropout, scale, keep
        self._groups = [name_of("ContextParallelAttention", group) for group in _groups_of(mesh, algorithm, inner)]
        self._mask, self._plans = mask, dict[int, AdaptivePlan]()

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process group; for hybrid attention that of the ring, then that of the neighbours."""
        return [group_of_name(name) for name in self._groups]

    @property
    def layout(self) -> Layout:
        """The chunks of a sequence that each rank holds."""
        outer, *inner = self.groups
        if self.algorithm in ("ulysses", "adaptive"):
            return contiguous(outer.size())
        spread = (zigzag if self.causal else contiguous)(outer.size())
        return nested(spread, inner[0].size()) if inner else spread

    @property
    def rank(self) -> int:
        """Place of this rank in the layout."""
        outer, *inner = self.groups
        return outer.rank() * inner[0].size() + inner[0].rank() if inner else outer.rank()

    def shard(self, batch: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of a batch that has all of them in dimension ``dim``.

        Raises OperatorError for a number of tokens that the chunks of the layout do not divide.
        """
        layout = self.layout
        share_of(batch.shape[dim], layout.count, "ContextParallelAttention.shard", "tokens", "chunks")
        return layout.take(batch, self.rank, dim)

    def positions(self, tokens: int, device: torch.device | str | None = None) -> Tensor:
        """Return the places of this rank's tokens in a sequence of ``tokens``."""
        return self.shard(torch.arange(tokens, device=device), 0)

    @torch.no_grad()
    def unshard(self, share: Tensor, dim: int = 1) -> Tensor:
        """Return the whole sequence on every rank from the shares of all; without gradients."""
        shares = [share]
        for group in reversed(self.groups):
            found = [torch.empty_like(part) for part in shares for _ in range(group.size())]
            for number, part in enumerate(shares):
                dist.all_gather(found[number :: len(shares)], part.contiguous(), group=group)
            shares = found
        return self.layout.restore(shares, dim)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        ends: Sequence[Sequence[int]] = (),
        slopes: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of this rank's queries to the keys of all ranks; differentiable.

        ``query`` is [batch, tokens here, heads, width], ``key`` and ``value`` [batch, tokens here, key heads, width], all fp64,
        fp32, bf16 or fp16 of one type; under autocast they are converted to its type. ``ends`` are for each row the ends of
        its documents in the whole sequence, ``slopes`` [heads] those of ALiBi; the adaptive algorithm has neither. Raises
        OperatorError for other shapes.
        """
        if self.algorithm == "adaptive" and (ends or slopes is not None):
            refuse("ContextParallelAttention: adaptive attention has no documents and no slopes", 'use algorithm="ring"')
        return _attend(self, query, key, value, {"ends": ends, "slopes": slopes})

    def extra_repr(self) -> str:
        return f"algorithm={self.algorithm!r}, causal={self.causal}, dropout={self.dropout}, ranks={self.layout.ranks}"

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, seen: dict[str, Any]) -> Tensor:
        """Attention of [tokens here, batch, heads, width]."""
        common: dict[str, Any] = {"scale": self.scale, "dropout": self.dropout if self.training else 0.0}
        outer, *inner = self.groups
        if self.algorithm == "adaptive":
            tokens = len(query) * outer.size()
            if tokens not in self._plans:
                mask = RuleMask(MaskRule(), tokens) if self._mask is None else self._mask
                self._plans[tokens] = plan_mask(mask, outer.size())
            return adaptive_attention(query, key, value, outer, self._plans[tokens], **common)
        common |= {"causal": self.causal, **seen}
        if self.algorithm == "kv-allgather":
            return kv_allgather_attention(query, key, value, outer, **common)
        if self.algorithm == "ulysses":
            return ulysses_attention(query, key, value, outer, keep=self.keep, **common)
        if self.algorithm == "ring":
            return ring_attention(query, key, value, outer, keep=self.keep, **common)
        common["slopes"] = own_heads(seen["slopes"], inner[0])

        def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ring_attention(q, k, v, outer, keep=self.keep, **common)

        return hybrid_attention(query, key, value, inner[0], ring)


@in_autocast_type("query", "key", "value")
def _attend(module: ContextParallelAttention, query: Tensor, key: Tensor, value: Tensor, seen: dict[str, Any]) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    return module._attend(q, k, v, seen).transpose(0, 1)


def _groups_of(mesh: Mesh, algorithm: Algorithm, inner: int | None) -> list[dist.ProcessGroup]:
    """Return the group of an algorithm; for hybrid attention make those of the ring and of its neighbours."""
    name = "ContextParallelAttention"
    if algorithm != "hybrid":
        return [group_of(mesh, name)]
    if not isinstance(mesh, dist.ProcessGroup) and mesh.ndim == 2:
        if inner not in (None, mesh.size(1)):
            refuse(f"{name}: inner is {inner}, but the mesh has {mesh.size(1)} neighbours", f"pass inner={mesh.size(1)}")
        return [mesh.get_group(0), mesh.get_group(1)]
    group = group_of(mesh, name)
    if inner is None or group.size() % inner:
        divisors = [str(n) for n in range(1, group.size() + 1) if group.size() % n == 0]
        refuse(f"{name}: inner={inner} does not divide {group.size()} ranks", f"pass inner={' or '.join(divisors)}")
    groups = make_groups(group, inner)
    return [groups.outer, groups.inner]
