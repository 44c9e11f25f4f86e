"""A mixture of experts on the calls of `mindspeed.moe`: grouped products, tokens dispatched to the ranks of their experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed.features.moe_zero_memory.forgetting_products import answers, do_first
from mindspeed.moe.allgather import AllGatherCall, GatheredCall
from mindspeed.moe.alltoall import AllToAllCall, Placement
from mindspeed.moe.overlap import OverlappedCall, Redispatch
from mindspeed.moe.products import Weight, deferred, grouped_product
from mindspeed.moe.routing import expert_indices
from mindspeed.nn.activation import SwiGLU
from mindspeed.nn.mesh import Mesh, group_of, share_of
from mindspeed.ops.autocast import in_autocast_type
from mindspeed.ops.errors import refuse
from mindspeed.ops.npu_fused_moe_token_permute import npu_fused_moe_token_permute
from mindspeed.ops.npu_fused_moe_token_unpermute import npu_fused_moe_token_unpermute
from mindspeed.ops.npu_gmm import npu_gmm
from mindspeed.ops.process_groups import group_of_name, name_of
from mindspeed.ops.swiglu import swiglu

Dispatcher: TypeAlias = Literal["alltoall", "allgather"]
_DISPATCHERS: Final[tuple[str, ...]] = get_args(Dispatcher)
ZeroMemory: TypeAlias = Literal["level0", "level1"]
_LEVELS: Final[tuple[str, ...]] = get_args(ZeroMemory)


class TopKRouter(nn.Linear):
    """Chooses the ``top_k`` experts of the largest probability: softmax over all experts in fp32, then top-k.

    ``normalize`` divides the chosen probabilities by their sum (Mixtral, arXiv 2401.04088). ``weight`` is [experts, hidden].
    """

    def __init__(
        self,
        hidden_size: int,
        experts: int,
        top_k: int,
        *,
        normalize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not 0 < top_k <= experts:
            refuse(f"TopKRouter: top_k is {top_k}, but there are {experts} experts", f"use a top_k of 1 to {experts}")
        super().__init__(hidden_size, experts, False, device, dtype)
        self.top_k, self.normalize = top_k, normalize

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return probabilities [tokens, experts], 0 where not chosen, and the boolean map of the chosen experts."""
        probs_TE = super().forward(input).softmax(-1, dtype=torch.promote_types(input.dtype, torch.float32))
        probs_TK, chosen_TK = probs_TE.topk(self.top_k)
        if self.normalize:
            probs_TK = probs_TK / probs_TK.sum(-1, keepdim=True)
        map_TE = torch.zeros_like(probs_TE, dtype=torch.bool).scatter(1, chosen_TK, True)
        return torch.zeros_like(probs_TE).scatter(1, chosen_TK, probs_TK), map_TE


class MoE(nn.Module):
    """Sends each token to the ``top_k`` of ``experts`` SwiGLU feed-forward networks and sums their weighted outputs.

    Without dropped tokens and without capacity (Gale et al., arXiv 2211.15841): ``out = sum_e p_e down_e(swiglu(up_e(x)))``,
    plus a shared expert of ``shared_size`` that sees every token (Dai et al., arXiv 2401.06066).

    With ``mesh``, a `DeviceMesh` of one dimension or a process group, each rank has an equal share of the experts and its own
    tokens. ``dispatcher`` alltoall sends a token to the ranks of its experts, allgather sends every token to every rank, with
    equally many tokens on each. The shared expert is computed while tokens travel. ``chunks`` splits the experts of a rank, so
    that the transfers of one chunk are overlapped with the products of another. With ``zero_memory`` ranks do not keep the
    tokens that they received: backward sends them again. ``level0`` keeps the outputs of ``up``, ``level1`` recomputes them.

    ``up`` is [experts here, hidden, 2 ffn] and ``down`` [experts here, ffn, hidden]. ``router`` is any module from
    [tokens, hidden] to probabilities and a boolean map, both [tokens, experts], of at most ``top_k`` experts for each token; by
    default a `TopKRouter`. The gradients of `expert_parameters` are sums over the tokens of all ranks in ``mesh``: average them
    over the other ranks alone, and divide by the size of ``mesh`` where the loss is a mean of ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        experts: int,
        top_k: int,
        *,
        mesh: Mesh | None = None,
        dispatcher: Dispatcher = "alltoall",
        chunks: int = 1,
        shared_size: int = 0,
        zero_memory: ZeroMemory | None = None,
        router: nn.Module | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dispatcher not in _DISPATCHERS:
            refuse(f"MoE: no dispatcher {dispatcher!r}", f"use one of {', '.join(_DISPATCHERS)}")
        if dispatcher == "allgather" and chunks > 1:
            refuse(f"MoE: the dispatcher allgather cannot split experts into {chunks} chunks", "pass chunks=1")
        if zero_memory not in (None, *_LEVELS):
            refuse(f"MoE: no zero_memory {zero_memory!r}", f"use one of {', '.join(_LEVELS)}")
        if dispatcher == "allgather" and zero_memory is not None:
            refuse("MoE: the dispatcher allgather cannot send tokens again for zero_memory", "pass dispatcher='alltoall'")
        group = None if mesh is None else group_of(mesh, "MoE")
        own = share_of(experts, 1 if group is None else group.size(), "MoE", "experts")
        share_of(own, chunks, "MoE", "experts of a rank", "chunks")
        self.experts, self.top_k, self.dispatcher, self.chunks = experts, top_k, dispatcher, chunks
        self.zero_memory = zero_memory
        self._group = None if group is None or group.size() == 1 else name_of("MoE", group)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.router = TopKRouter(hidden_size, experts, top_k, **place) if router is None else router
        self.up = nn.Parameter(torch.empty(own, hidden_size, 2 * ffn_size, **place))
        self.down = nn.Parameter(torch.empty(own, ffn_size, hidden_size, **place))
        self.shared: nn.Module | None = None
        if shared_size:
            first = nn.Linear(hidden_size, 2 * shared_size, bias=False, **place)
            self.shared = nn.Sequential(first, SwiGLU(), nn.Linear(shared_size, hidden_size, bias=False, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of the experts; those of router and shared expert are drawn by their modules."""
        for weight in self.expert_parameters():
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def expert_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this rank's experts."""
        return [self.up, self.down]

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the tokens in ``x`` [..., hidden] of any floating-point type, like it; differentiable.

        Under autocast the experts compute in its type.
        """
        x_TH = x.reshape(-1, x.shape[-1])
        probs_TE, map_TE = self.router(x_TH)
        rows_TH, up, down = _of_one_type(x_TH, self.up, self.down)
        experts = _Experts(up, down, self.zero_memory)
        if (group := self.group) is None:
            outputs = self._local(rows_TH, experts, probs_TE, map_TE)
        else:
            dispatch = self._all_to_all if self.dispatcher == "alltoall" else self._all_gather
            outputs = dispatch(group, rows_TH, experts, probs_TE, map_TE)
        return outputs.view(*x.shape[:-1], -1)

    def _local(self, x_TH: Tensor, experts: _Experts, probs_TE: Tensor, map_TE: Tensor) -> Tensor:
        chosen_TK = expert_indices(map_TE, self.top_k)
        expert_TK = chosen_TK.clamp(min=0)  # a missing choice is a row of weight 0
        probs_TK = probs_TE.gather(1, expert_TK) * (chosen_TK >= 0)
        counts_E = expert_TK.new_zeros(self.experts).index_add(0, expert_TK.flatten(), torch.ones_like(expert_TK).flatten())
        ends_E = counts_E.cumsum(0)
        rows_RH, places = npu_fused_moe_token_permute(x_TH, expert_TK)
        h_RF = swiglu(npu_gmm(rows_RH, experts.up, group_list=ends_E))
        outputs_RH = npu_gmm(h_RF, experts.down, group_list=ends_E)
        outputs = npu_fused_moe_token_unpermute(outputs_RH, places, probs_TK.to(outputs_RH.dtype))
        return outputs if self.shared is None else outputs + self.shared(x_TH)

    def _all_to_all(
        self, group: dist.ProcessGroup, x_TH: Tensor, experts: _Experts, probs_TE: Tensor, map_TE: Tensor
    ) -> Tensor:
        place = Placement(self.experts, group, group.rank(), group.size(), group, parts=self.chunks)
        rows = len(map_TE) * self.top_k if isinstance(self.router, TopKRouter) else None
        call = AllToAllCall(place, map_TE, self.top_k, rows)
        transfers = OverlappedCall(call, x_TH.detach(), probs_TE.dtype)
        transfers.post(call.permute(x_TH), call.permute_probabilities(probs_TE))
        shared = None if self.shared is None else self.shared(x_TH)
        transfers.answer(experts)
        outputs = call.unpermute(transfers.collect())
        call.forget()
        return outputs if shared is None else outputs + shared

    def _all_gather(
        self, group: dist.ProcessGroup, x_TH: Tensor, experts: _Experts, probs_TE: Tensor, map_TE: Tensor
    ) -> Tensor:
        own = len(self.up)
        call = AllGatherCall(group, group.rank() * own, own, map_TE, self.top_k)
        probs, tokens = call.gather(call.choose(probs_TE)), call.gather(x_TH)
        shared = None if self.shared is None else self.shared(x_TH)
        sums_NH = call.unpermute(GatheredCall(call, tokens.wait, probs.wait).answer(experts))
        outputs = call.scatter(sums_NH.to(probs_TE.dtype)).wait().to(x_TH.dtype)
        return outputs if shared is None else outputs + shared

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that the experts are split over; None where one rank has all of them."""
        return None if self._group is None else group_of_name(self._group)

    def extra_repr(self) -> str:
        return f"experts={self.experts}, top_k={self.top_k}, dispatcher={self.dispatcher!r}, chunks={self.chunks}"


@dataclass(frozen=True, slots=True)
class _Experts:
    """The experts of one call, as the dispatchers of `mindspeed.moe` call them."""

    up: Tensor
    down: Tensor
    zero_memory: ZeroMemory | None

    def weights(self) -> tuple[Weight, Weight]:
        """Let both weights enter the graph here."""
        return deferred(self.up, *self.up.shape[:2]), deferred(self.down, *self.down.shape[:2])

    def products(
        self,
        x_RH: Tensor,
        probs: Callable[[], Tensor],
        ends: Tensor,
        weights: tuple[Weight, Weight],
        first: int = 0,
        again: Redispatch | None = None,
    ) -> Tensor:
        """Return the weighted outputs [R, H] of the experts from ``first`` on, whose last rows plus one are ``ends``."""
        if again is not None and self.zero_memory is not None:
            return answers(x_RH, probs, ends, weights, first, again, _activation, self.zero_memory == "level0")
        h = grouped_product(x_RH, weights[0], ends, first)
        return grouped_product(_activation(h, probs().unsqueeze(-1)), weights[1], ends, first)

    def before_backward(self, received: Tensor, again: Redispatch) -> Tensor:
        """Return the outputs on their way back; with level1 their backward pass begins to send the rows again."""
        return do_first(received, again.start) if self.zero_memory == "level1" else received


def _activation(h_RF: Tensor, probs_R1: Tensor) -> Tensor:
    """Return the weighted SwiGLU of a first product."""
    return (swiglu(h_RF) * probs_R1).to(h_RF.dtype)


@in_autocast_type("x", "up", "down")
def _of_one_type(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, up, down
