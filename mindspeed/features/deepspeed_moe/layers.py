"""Megatron's MoE layer with a gate that has a capacity: the same router weights, experts, names and checkpoints.

T tokens of this rank, in groups of its own; E experts; K experts per token; H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, save_to_aux_losses_tracker
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn import Module

from mindspeed import plugins as ms
from mindspeed.features.deepspeed_moe.gating import Choices, Routing, admit, choose, highest
from mindspeed.features.deepspeed_moe.tables import ExpertRanks, RowOrder, combine_by_masks, dispatch_by_masks
from mindspeed.features.deepspeed_moe.units import SingleExperts, UnitCall, Units
from mindspeed.megatron.module_specs import with_modules
from mindspeed.moe.capacity import CapacityOptions
from mindspeed.moe.grouped_experts import GroupedExperts
from mindspeed.moe.transfer import Steps, finished
from mindspeed.problems import Fix, advice

JITTER: Final = 1e-2
"""Largest relative change of an input of the gate, as DeepSpeed has it."""


class CapacityMoELayer(MoELayer):  # type: ignore[misc]
    """``MoELayer`` whose experts have an equal number of places on every rank."""

    def __init__(self, *args: Any, options: CapacityOptions, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = options
        self.routing_listeners: list[Callable[[Tensor], None]] = []
        """Are called with the map [T, E] of the choices that are kept, as hooks of Megatron's router are with its map."""
        self.ranks = ExpertRanks(self.ep_group, self.token_dispatcher.tp_group, self.token_dispatcher.tp_ep_group)
        if self.config.add_bias_linear and hasattr(self.experts, "local_experts"):  # grouped ones add their biases
            add_bias = partial(_with_share_of_bias, size=self.token_dispatcher.tp_group.size())
            for expert in self.experts.local_experts:
                expert.linear_fc2.register_forward_hook(add_bias)

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return the experts' outputs [S, B, H]. Padding masks and parts of a layer (CUDA graphs) are refused."""
        if padding_mask is not None or intermediate_tensors is not None:
            what = "a padding mask" if padding_mask is not None else "parts of a layer captured as CUDA graphs"
            text = f"deepspeed-moe: a MoE layer received {what}, which the gate does not support"
            raise ms.MindSpeedError([ms.Problem("MS304", text, ("deepspeed-moe",), fix=Fix.remove_feature("deepspeed-moe"))])
        if self.moe_layer_recompute:
            return tensor_parallel.checkpoint(self.run, False, hidden_states), None
        return self.run(hidden_states), None

    def run(self, x_SBH: Tensor) -> Tensor:
        """Gate, dispatch, experts, return and combination, with shared experts under the dispatch."""
        return finished(self.steps(x_SBH))

    def steps(self, x_SBH: Tensor, chunks: int = 1, relayed: bool = False) -> Steps:
        """Run the layer on one of the ``chunks`` of a micro-batch, and pause where dispatch and return are under way.

        With ``relayed`` it pauses too where tensor ranks gather rows and sum answers.
        """
        x_TH = x_SBH.reshape(-1, x_SBH.shape[-1])
        routing = self.route(x_SBH, chunks)
        shared: list[Tensor] = []

        def share() -> None:
            if self.use_shared_expert:
                shared.append(self.shared_answers(x_SBH))

        if self.options.reference:
            share()
            y_TH = self.every_expert(x_TH, routing)
        elif self.options.rearranged:
            order = RowOrder.of(routing)
            answers = yield from self.expert_answers(order.dispatch(x_TH), routing, share, relayed)
            y_TH = order.combine(answers, x_TH.shape[0])
        else:
            answers = yield from self.expert_answers(dispatch_by_masks(x_TH, routing), routing, share, relayed)
            y_TH = combine_by_masks(answers, routing)
        y_SBH = y_TH.view(x_SBH.shape)
        return y_SBH + shared[0] if shared else y_SBH

    def route(self, x_SBH: Tensor, chunks: int = 1) -> Routing:
        """Choose the experts of every token, attach the auxiliary losses, and give out the places."""
        choices = self.choose(x_SBH, chunks)
        tokens = choices.expert.shape[1]
        need = self.ranks.post_maximum(choices.need()) if self.options.dropless else None
        if self.training and torch.is_grad_enabled():
            choices = replace(choices, probability=self.with_losses(choices, chunks))
        options = self.options
        places = options.capacity(tokens, choices.experts, choices.topk, self.training)
        routing = admit(choices, places if need is None else options.padded(need(), tokens))
        for listen in self.routing_listeners:
            listen(routing.kept())
        return routing

    def choose(self, x_SBH: Tensor, chunks: int) -> Choices:
        """Let the router's logits decide in fp32, with noise in training."""
        options, groups = self.options, self.groups(x_SBH.shape[0] * x_SBH.shape[1], chunks)
        noise = options.noise if self.training else "none"
        has_one_expert = self.config.moe_router_topk == 1
        x_SBH = self.router.apply_input_jitter(x_SBH)
        if noise == "jitter":
            x_SBH = (x_SBH.float() * (1 + JITTER * (2 * drawn(x_SBH) - 1))).to(x_SBH.dtype)
        logits_GTE = self.router.gating(x_SBH).float().reshape(groups, -1, self.config.num_moe_experts)
        gumbel_GTE = -(-drawn(logits_GTE).log()).log() if noise == "rsample" and has_one_expert else None
        draws_GT = drawn(logits_GTE[..., 0]) if options.random_priority and self.training and has_one_expert else None

        def select(score_GTE: Tensor, topk: int) -> Tensor:
            chosen_SBK = self.choose_experts(score_GTE.view(*x_SBH.shape[:2], -1))
            return chosen_SBK.view(groups, -1, topk)

        return choose(logits_GTE, self.config.moe_router_topk, gumbel_GTE, draws_GT, options.sinkhorn, select)

    def choose_experts(self, scores_SBE: Tensor) -> Tensor:
        """Give the experts [S, B, K] of each token. Verification has it repeat the choices of another run."""
        return highest(scores_SBE, self.config.moe_router_topk)

    def groups(self, tokens: int, chunks: int) -> int:
        """The groups of a chunk of this rank's tokens. Raises MindSpeedError where they are not equally many of each."""
        ranks: int = self.router.tp_cp_group.size()
        shares, groups = ranks * chunks, self.options.groups or ranks
        if groups % shares or tokens % (groups // shares):
            text = (
                f"deepspeed-moe: groups={groups} cannot split the {tokens * shares} tokens of a micro-batch. The number of "
                f"groups must divide the tokens, and must be a multiple of {ranks} x {chunks} (tensor- and context-parallel "
                "ranks x token chunks per rank)"
            )
            fix = f"--set deepspeed-moe.groups={shares}"
            raise ms.MindSpeedError([ms.Problem("MS304", text, ("deepspeed-moe",), fix=advice(fix))])
        return groups // shares

    def with_losses(self, choices: Choices, chunks: int) -> Tensor:
        """Attach the losses, means over the groups of all ranks and chunks of a micro-batch, to the probabilities."""
        config, group = self.config, self.router.tp_cp_group
        shares = group.size() * chunks
        balance = config.moe_aux_loss_coeff if config.moe_router_load_balancing_type == "aux_loss" else 0.0
        terms = {
            "load_balancing_loss": (choices.balance_loss, balance),
            "z_loss": (choices.z_loss, config.moe_z_loss_coeff or 0.0),
        }
        tokens, probability = choices.expert.shape[:2].numel(), choices.probability
        for name, (loss, coefficient) in terms.items():
            if not coefficient:
                continue
            share = loss() / shares
            layers = config.num_layers + (config.mtp_num_layers or 0)
            save_to_aux_losses_tracker(name, share, self.router.layer_number, layers, reduce_group=group)
            # Gradients are later divided by the tokens of a micro-batch, whose share this rank has, or are means over it.
            scale = tokens * shares if config.calculate_per_token_loss else 1
            probability = MoEAuxLossAutoScaler.apply(probability, share * (coefficient * scale))
        return probability

    def expert_answers(self, rows: Tensor, routing: Routing, meanwhile: Callable[[], None], relayed: bool) -> Steps:
        """Send the table [E x N, H] to the experts, run ``meanwhile``, and return their outputs."""
        if self.options.parts:
            answers = yield from self.answers_of_units(rows, routing, meanwhile, relayed)
            return answers
        arrived = self.ranks.send(rows)
        meanwhile()
        yield
        gathered = self.ranks.gather(arrived())
        if relayed:
            yield
        answers = self.answers(self.ranks.by_expert(gathered(), self.num_local_experts))
        summed = self.ranks.scatter(self.ranks.by_rank(answers, self.num_local_experts))
        if relayed:
            yield
        returned = self.ranks.send(summed())
        yield
        return returned()

    def answers_of_units(self, rows: Tensor, routing: Routing, meanwhile: Callable[[], None], relayed: bool) -> Steps:
        """Do the same unit by unit; gathers and scatters overlap within, so that their pauses have nothing to wait for."""
        groups, parts = routing.expert.shape[0], self.options.parts
        units = Units.of(self.ranks.group.size(), self.num_local_experts, groups, routing.capacity, parts)
        call = UnitCall(self.ranks, units, self.options.streams)
        call.post(rows)
        meanwhile()
        yield
        if relayed:
            yield
        if isinstance(self.experts, GroupedExperts):
            self.experts(rows, call, None)
        else:
            call.answer(SingleExperts(self.experts.local_experts))
        if relayed:
            yield
        yield
        return call.collect()

    def every_expert(self, x_TH: Tensor, routing: Routing) -> Tensor:
        """The formula: every expert on every token, times its weight."""
        experts = self.config.num_moe_experts
        y_ETH = self.answers(x_TH.repeat(experts, 1)).view(experts, *x_TH.shape)
        weight_TK, expert_TK = routing.weight.flatten(0, 1), routing.expert.flatten(0, 1)
        weight_TE = torch.zeros_like(y_ETH[..., 0].t(), dtype=weight_TK.dtype).scatter(1, expert_TK, weight_TK)
        return torch.einsum("te,eth->th", weight_TE.to(x_TH.dtype), y_ETH)

    def answers(self, rows: Tensor) -> Tensor:
        """Run the local experts on equal shares of rows. Weights come later, so that biases are weighed too."""
        share = rows.shape[0] // self.num_local_experts
        counts = torch.full((self.num_local_experts,), share, dtype=torch.int64, device="cpu")
        grouped = isinstance(self.experts, GroupedExperts)
        ones = None if grouped else torch.ones(rows.shape[0], dtype=torch.float32, device=rows.device)
        answers: Tensor
        answers, bias = self.experts(rows, counts, ones)
        return answers if bias is None else answers + bias

    def shared_answers(self, x_SBH: Tensor) -> Tensor:
        """Run the shared experts."""
        if self.shared_experts_recompute:
            y_SBH: Tensor = tensor_parallel.checkpoint(self.shared_experts, False, x_SBH)
            return y_SBH
        return self.shared_experts(x_SBH)  # type: ignore[no-any-return]


def _with_share_of_bias(layer: Module, inputs: Any, output: tuple[Tensor, Tensor], size: int) -> tuple[Tensor, None]:
    """Add its part of the bias on each of the ranks whose outputs are summed. Megatron sums the gradients of the parts."""
    answers, bias = output
    return answers + bias / size, None


def drawn(like: Tensor) -> Tensor:
    """Uniform numbers in fp32, drawn differently on every tensor-parallel rank, since its tokens are others."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    if not tracker.is_initialized():
        return torch.rand(like.shape, device=like.device)
    with tracker.fork():
        return torch.rand(like.shape, device=like.device)


def with_capacity(spec: Any, args: Any) -> Any:
    """Exchange ``MoELayer`` in a spec for the layer with a capacity, and give it the feature's settings."""
    settings = args.model_dump(exclude={"interval"})
    settings["eval_capacity_factor"] = args.eval_capacity_factor or args.capacity_factor
    layer = ModuleSpec(module=CapacityMoELayer, params={"options": CapacityOptions(**settings)})
    return with_modules(spec, {MoELayer: layer})
