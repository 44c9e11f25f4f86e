"""One layer with a capacity on the share of this rank of some groups of tokens: what it chose, gave and sent."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._moe_layer import Shape, build
from benchmarks._virtual_time import virtual_time
from mindspeed.features.deepspeed_moe.gating import Choices, Routing
from mindspeed.platforms.collectives import traffic

GROUPS, TOKENS = 4, 16
"""Groups of all ranks together, and the tokens of one."""


@dataclass
class Seen:
    """What a layer chose, gave and sent: per group where there are groups, ``experts`` by the number of the expert."""

    kept: Tensor
    capacity: int
    losses: list[Tensor]
    rows: dict[str, Tensor]
    router: Tensor
    experts: dict[int, list[Tensor]]
    all_to_all: int
    maxima: tuple[int, int]


def measure(skew: dict[int, float], ranks: list[int] | None = None, groups: int = GROUPS) -> Seen:
    """Run the share of this rank of ``groups`` groups forward and backward; ``skew`` holds on ``ranks`` alone if given."""
    layer = build(Shape(), torch.float32)
    rank, size = dist.get_rank(), dist.get_world_size()
    share = groups // size
    layer.options = replace(layer.options, groups=share * layer.router.tp_cp_group.size())
    # A layer means its losses over the groups that it has, and DDP those of ranks.
    layer.config.moe_router_load_balancing_type, layer.config.moe_aux_loss_coeff = "aux_loss", 0.5 * share
    chosen: list[tuple[Choices, Routing, Tensor]] = []
    gating, choose, route = layer.router.gating, layer.choose, layer.route

    def pushed(x: Tensor) -> Tensor:
        push = torch.zeros(8)
        if ranks is None or rank in ranks:
            for expert, number in skew.items():
                push[expert] = number
        logits = gating(x) + push
        logits.retain_grad()
        chosen.append((None, None, logits))  # type: ignore[arg-type]
        return logits

    def routed(*args: Any) -> Routing:
        routing = route(*args)
        chosen[-1] = (chosen[-1][0], routing, chosen[-1][2])
        return routing  # type: ignore[no-any-return]

    def chose(*args: Any) -> Choices:
        choices = choose(*args)
        chosen[-1] = (choices, None, chosen[-1][2])  # type: ignore[assignment]
        return choices  # type: ignore[no-any-return]

    layer.router.gating, layer.route, layer.choose = pushed, routed, chose
    drawn = [torch.randn(groups * TOKENS, 1, 32, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    mine = slice(rank * share * TOKENS, (rank + 1) * share * TOKENS)
    x, dy = (whole[mine].clone() for whole in drawn)
    x.requires_grad_()
    with virtual_time(1, 1) as schedule, traffic() as moved:
        y = layer(x)[0]
        y.backward(dy)
    ((choices, routing, logits),) = chosen
    losses = [
        replace(choices, **{name: getattr(choices, name)[g : g + 1] for name in ("logits", "p", "expert", "probability")})
        .balance_loss()
        .detach()
        for g in range(share)
    ]
    weights: dict[int, list[Tensor]] = {}
    local = layer.num_local_experts
    for name, parameter in layer.experts.named_parameters():
        shared = [int(part) for part in name.split(".") if part.isdigit()]
        parts = parameter.grad.view(local, -1) if not shared else [parameter.grad]  # type: ignore[union-attr]
        for number, part in enumerate(parts):
            weights.setdefault(layer.ep_group.rank() * local + (shared or [number])[0], []).append(part)
    return Seen(
        routing.kept(),
        routing.capacity,
        losses,
        {"answers": y.detach().flatten(0, 1), "input": x.grad.flatten(0, 1), "logits": logits.grad.flatten(0, 1)},  # type: ignore[union-attr]
        layer.router.weight.grad,
        weights,
        int(schedule.total("transfer all_to_all")),
        next(((count.calls, count.bytes) for (kind, _), count in moved.items() if kind == "all_reduce"), (0, 0)),
    )


def whole(ranks: list[Seen]) -> dict[str, Tensor]:
    """Everything of all ranks but the gradient of the router, which data parallelism sums."""
    rows = {name: torch.cat([rank.rows[name] for rank in ranks]) for name in ranks[0].rows}
    experts = {number: parts for rank in ranks for number, parts in rank.experts.items()}
    return {
        "kept": torch.cat([rank.kept for rank in ranks]),
        "losses": torch.stack([loss for rank in ranks for loss in rank.losses]),
        **rows,
        **{f"expert {number} {place}": part for number in sorted(experts) for place, part in enumerate(experts[number])},
    }
