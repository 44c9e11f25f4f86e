"""Megatron's two dispatchers on the calls of this library: mixins with their methods and signatures."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region
from torch import Tensor

from mindspeed.moe.allgather import AllGatherCall, GatheredCall
from mindspeed.moe.alltoall import AllToAllCall, Placement, Splits
from mindspeed.moe.overlap import OverlappedCall, send
from mindspeed.moe.routing import RowIndex, positions_of, probabilities_of, sum_rows, take_rows
from mindspeed.ops.process_groups import post_all_gather
from mindspeed.platforms.host_copy import HostCopy
from mindspeed.problems import Fix, MindSpeedError, Problem


class OncePerRankCall(AllToAllCall):
    """The routing of one call. Counts of rows and of pairs are gathered as one, and read once.

    Probabilities [P, C] of all experts of a rank travel beside a token, -1 where it does not go to the expert.
    """

    probabilities_first = True

    def __init__(self, place: Placement, routing_map_TE: Tensor, topk: int) -> None:
        """A token has at most ``topk`` experts. ``place`` has no tensor ranks, for these would gather uncounted pairs."""
        self.place, self.tokens, self.topk, self.capacity = place, routing_map_TE.shape[0], topk, None
        self._chosen = place.in_rows(routing_map_TE)
        self._map = place.by_part(self._chosen).any(-1).flatten(1)
        gathered = post_all_gather(place.everyone, torch.cat([self._chosen.sum(0), self._map.sum(0)]))
        self._gathered = HostCopy(gathered.wait)
        self._indices: dict[int, RowIndex] = {}

    @cached_property
    def counts(self) -> Tensor:
        """Rows [1, rank, part, rank of the expert, expert] that each rank sends, on the device."""
        numbers = self._gathered.on_device().view(self.place.ranks, -1)
        return self.place.by_part(numbers[:, : self.place.experts]).unsqueeze(0)

    @cached_property
    def _on_host(self) -> tuple[list[Splits], list[int]]:
        """The splits of every part, and the rows of this rank's experts: the one read of a call."""
        place = self.place
        host = self._gathered.wait().view(place.ranks, -1)  # rows [rank, E] to experts, then pairs [rank, parts x ranks]
        rows = place.by_part(host[:, : place.experts]).sum((0, -1))[:, place.rank]
        pairs = host[:, place.experts :].view(place.ranks, place.parts, place.ranks)
        splits = []
        for part in range(place.parts):
            received = pairs[:, part, place.rank].tolist()
            splits.append(Splits(pairs[place.rank, part].tolist(), received, [sum(received)]))
        return splits, rows.tolist()

    @property
    def on_host(self) -> list[Splits]:
        """The splits of every part, in pairs."""
        return self._on_host[0]

    @cached_property
    def positions(self) -> Tensor:
        """Place of each pair in the transposed map of tokens and ranks."""
        return positions_of(self._map, sum(sum(splits.sent) for splits in self.on_host))

    def permute_probabilities(self, probs_TE: Tensor) -> Tensor:
        """The probabilities [P, C] of the experts of each pair's rank."""
        marked = torch.where(self._chosen, self.place.in_rows(probs_TE), -1)
        by_rank = marked.view(self.tokens, -1, self.place.part_size).transpose(0, 1)
        return by_rank.reshape(-1, self.place.part_size).index_select(0, self.positions)

    def arrange_probabilities(self, received: Tensor, part: int) -> Tensor:
        """The probability [R] of each row, by the order of experts; finds the rows that `arrange` copies."""
        chosen = received >= 0
        positions = positions_of(chosen, self._on_host[1][part])
        self._indices[part] = RowIndex(chosen, positions, self.topk)
        return probabilities_of(received, positions)

    def arrange(self, received: Tensor, part: int) -> Tensor:
        """Copy what a part received for each of its experts: [R, H]. `arrange_probabilities` comes first."""
        return take_rows(received, self._indices[part])

    def disarrange(self, answers: Tensor, part: int, dtype: torch.dtype) -> Tensor:
        """Sum the outputs of each received pair: [P, H]."""
        return sum_rows(answers, self._indices[part])


class AllToAllDispatch:
    """Stands before ``MoEAlltoAllTokenDispatcher``. ``call`` is set from the first method of a forward pass to the last."""

    parts = 1
    once_per_rank = False
    call: Any = None
    shared_experts: Any
    config: Any

    def dispatch_preprocess(self: Any, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Post the counts of rows, and give the rows [R, H] of the tokens with the probability [R] of each."""
        check_routing(self.config, hidden_states, routing_map, probs)
        self.hidden_shape, self.dtype = hidden_states.shape, probs.dtype
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        self.call = self.make_call(routing_map)
        self.source = x_TH.detach()
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        return self.call.permute(x_TH), self.call.permute_probabilities(probs)

    def make_call(self: Any, routing_map: Tensor) -> AllToAllCall:
        """Begin a call; the number of rows follows from the map alone where tokens can be dropped."""
        config, tokens, topk = self.config, routing_map.shape[0], self.config.moe_router_topk
        if self.once_per_rank and self.ep_size > 1:
            return OncePerRankCall(placement(self), routing_map, topk)
        factor = config.moe_expert_capacity_factor
        if config.moe_pad_expert_input_to_capacity:
            from megatron.core.transformer.moe.moe_utils import get_capacity

            capacity = get_capacity(tokens * topk, config.num_moe_experts, factor)
            return AllToAllCall(placement(self), routing_map, topk, capacity=capacity)
        return AllToAllCall(placement(self), routing_map, topk, rows=None if factor is not None else tokens * topk)

    def token_dispatch(self: Any, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send rows and probabilities to the ranks of their experts."""
        if self.call.place.ranks > 1:
            sent = send(rows, self.call.dispatch(0)), send(probs, self.call.dispatch(0))
            rows, probs = (tensor.wait() for tensor in sent)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act()
        return rows, probs

    def dispatch_postprocess(self: Any, rows: Tensor, probs: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Bring what arrived into the order of experts: the rows, the number of each expert's, the probabilities."""
        probs = self.call.arrange_probabilities(probs, 0)
        return self.call.arrange(rows, 0), self.call.expert_counts(0), probs

    def combine_preprocess(self: Any, answers: Tensor) -> Tensor:
        """Return outputs in the order in which their rows arrived."""
        arranged: Tensor = self.call.disarrange(answers, 0, self.dtype)
        return arranged

    def token_combine(self: Any, answers: Tensor, *options: Any, **more: Any) -> Tensor:
        """Send outputs back."""
        if self.call.place.ranks > 1:
            answers = send(answers, self.call.combine(0)).wait()
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward()
            self.shared_experts.post_forward_comm()
        return answers

    def combine_postprocess(self: Any, answers: Tensor) -> Tensor:
        """Sum the expert outputs of each token, in the shape of the layer's input, and add those of shared experts."""
        output: Tensor = self.call.unpermute(answers).view(self.hidden_shape)
        self.call.forget()
        self.call = self.source = None
        return output if self.shared_experts is None else output + self.shared_experts.get_output()


class OverlappedAllToAll(AllToAllDispatch):
    """The same with shared experts, weight gradients and parts of the experts between post and wait of every transfer."""

    def token_dispatch(self: Any, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Post rows and probabilities; the first product of shared experts hides them."""
        self.experts_call = OverlappedCall(self.call, self.source, self.dtype)
        rows = self.experts_call.post(rows, probs)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act()
        return rows, probs

    def dispatch_postprocess(self: Any, rows: Tensor, probs: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Give the experts the call in the place of counts: they wait for their rows themselves."""
        return rows, self.experts_call, probs

    def combine_preprocess(self: Any, answers: Tensor) -> Tensor:
        """Return a placeholder for the outputs, which are in flight."""
        return answers

    def token_combine(self: Any, answers: Tensor, *options: Any, **more: Any) -> Tensor:
        """Wait for the outputs; overlapped with the second product of shared experts."""
        call, self.experts_call = self.experts_call, None
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward()
            self.shared_experts.post_forward_comm()
        return call.collect()  # type: ignore[no-any-return]


class AllGatherDispatch:
    """Stands before ``MoEAllGatherTokenDispatcher``. ``call`` is set from the first method of a forward pass to the last."""

    call: Any = None
    shared_experts: Any
    config: Any

    def dispatch_preprocess(self: Any, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Post the indices of experts, and give tokens [T, H] and the probabilities [T, K] of their experts."""
        check_routing(self.config, hidden_states, routing_map, probs)
        self.hidden_shape, self.dtype = hidden_states.shape, probs.dtype
        topk, alone = self.config.moe_router_topk, self.tp_size * self.ep_size == 1
        rows = len(routing_map) * topk if alone and self.config.moe_expert_capacity_factor is None else None
        first, experts = self.local_expert_indices[0], self.num_local_experts
        self.call = AllGatherCall(self.tp_ep_group, first, experts, routing_map, topk, rows)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        return hidden_states.reshape(-1, hidden_states.shape[-1]), self.call.choose(probs)

    def token_dispatch(self: Any, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Post probabilities and tokens to all ranks, and the first product of shared experts before any wait."""
        posted = () if self.call.alone else (self.call.gather(probs), self.call.gather(tokens))
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act()
        if posted:
            self.experts_call = GatheredCall(self.call, posted[1].wait, posted[0].wait)
        else:
            self.experts_call = GatheredCall(self.call, lambda: tokens, lambda: probs)
        return tokens, probs

    def dispatch_postprocess(self: Any, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Wait in the order of posts: the rows, the number of each expert's, the probabilities."""
        call, posted, self.experts_call = self.call, self.experts_call, None
        counts, probs = call.counts, call.permute_probabilities(posted.probs())
        return call.permute(posted.tokens()), counts, probs

    def combine_preprocess(self: Any, answers: Tensor) -> Tensor:
        """Sum the outputs of this rank's experts for each token of all ranks."""
        summed: Tensor = self.call.unpermute(answers)
        return summed

    def token_combine(self: Any, answers: Tensor, *options: Any, **more: Any) -> Tensor:
        """Sum the outputs of all ranks for each local token; overlapped with the second product of shared experts."""
        posted = None if self.call.alone else self.call.scatter(answers.to(self.dtype))
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward()
            self.shared_experts.post_forward_comm()
        return answers if posted is None else posted.wait().to(answers.dtype)

    def combine_postprocess(self: Any, answers: Tensor) -> Tensor:
        """Return outputs in the shape of the layer's input, and add those of shared experts."""
        self.call = None
        output = answers.view(self.hidden_shape)
        return output if self.shared_experts is None else output + self.shared_experts.get_output()


def placement(dispatcher: Any) -> Placement:
    """Return the place of a dispatcher's experts among ranks, from its process groups."""
    shared = dispatcher.tp_size > 1
    return Placement(
        experts=dispatcher.config.num_moe_experts,
        group=dispatcher.ep_group,
        rank=dispatcher.ep_group.rank(),
        ranks=dispatcher.ep_size,
        everyone=dispatcher.tp_ep_group,
        tensor_rank=dispatcher.tp_rank if shared else 0,
        tensor_ranks=dispatcher.tp_size,
        gather=partial(_gather, dispatcher.tp_group) if shared else None,
        scatter=partial(_scatter, dispatcher.tp_group) if shared else None,
        parts=dispatcher.parts,
    )


def _gather(group: Any, rows: Tensor, counts: list[int]) -> Tensor:
    gathered: Tensor = gather_from_sequence_parallel_region(rows, group=group, output_split_sizes=counts)
    return gathered


def _scatter(group: Any, rows: Tensor, counts: list[int]) -> Tensor:
    share: Tensor = reduce_scatter_to_sequence_parallel_region(rows, group=group, input_split_sizes=counts)
    return share


def check_routing(config: Any, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> None:
    """Raise MindSpeedError with MS640 unless a router gave a boolean map and probabilities [tokens, experts]."""
    expected = (hidden_states.numel() // hidden_states.shape[-1], config.num_moe_experts)
    if tuple(routing_map.shape) == tuple(probs.shape) == expected and routing_map.dtype == torch.bool:
        return
    text = (
        f"a router returned a routing map of {routing_map.dtype} {tuple(routing_map.shape)} and probabilities "
        f"{tuple(probs.shape)}, but both must have the shape (tokens, experts) = {expected}, and the map must be boolean"
    )
    raise MindSpeedError(
        [Problem("MS640", text, fix=Fix.advise("make the router return one boolean and one probability per token and expert"))]
    )
