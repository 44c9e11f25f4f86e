"""How much a router's losses weigh in Megatron alone: ``torchrun --nproc-per-node 2 stock_loss_weights.py``.

Two ranks share the tokens of one micro-batch, by sequence parallelism or by context parallelism. What Megatron does with the
gradient of the router's weight afterwards is written out below. Printed is its norm over that of one process, which is 1 where
the layout changes nothing. Needs no mindspeed, no GPU and no Transformer Engine.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.package_info import __version__
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version

TOKENS, HIDDEN, EXPERTS = 32, 8, 4
SCHEDULE_MULTIPLIES = Version(__version__) >= Version("0.16")
"""Whether Megatron's schedule multiplies these losses by the ranks that share a sequence."""


def gradient(
    rows: torch.Tensor, groups: Any, per_token: bool, layout: dict[str, Any], scale: float, **losses: Any
) -> torch.Tensor:
    """The gradient of the router's weight by its losses alone."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        add_bias_linear=False,
        num_moe_experts=EXPERTS,
        moe_router_load_balancing_type="aux_loss",
        calculate_per_token_loss=per_token,
        use_cpu_initialization=True,
        **losses,
        **layout,
    )
    router = TopKRouter(config, groups)
    router.weight.data = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1))
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(scale))
    probs, _ = router.routing(torch.nn.functional.linear(rows, router.weight))
    (probs.sum() * 0).backward()
    return router.weight.grad


def weight(kind: str, per_token: bool, **losses: Any) -> float:
    """The norm on two ranks over that of one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batch = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(0))
    sizes = {"tensor_model_parallel_size": ranks} if kind == "tp" else {"context_parallel_size": ranks}
    layout = {**sizes, "sequence_parallel": kind == "tp"}

    parallel_state.initialize_model_parallel(**sizes)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    factor = ranks if kind == "cp" and not per_token and SCHEDULE_MULTIPLIES else 1
    shared = gradient(batch.chunk(ranks)[rank], groups, per_token, layout, float(factor), **losses)
    dist.all_reduce(shared)
    if kind == "cp" and not per_token:
        shared /= ranks  # the average over replicas
    parallel_state.destroy_model_parallel()

    groups.tp = groups.cp = groups.tp_cp = groups.tp_dp_cp = dist.new_subgroups(1)[0]
    whole = gradient(batch, groups, per_token, {}, 1.0, **losses)
    return float(shared.norm() / whole.norm())


def main() -> None:
    dist.init_process_group("gloo")
    for kind in ("tp", "cp"):
        for per_token in (False, True):
            balance = weight(kind, per_token, moe_aux_loss_coeff=0.1)
            z = weight(kind, per_token, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=0.1)
            if dist.get_rank() == 0:
                per = "token" if per_token else "micro-batch"
                print(f"{kind} {dist.get_world_size()}, a loss per {per}: aux loss {balance:.3f}, z-loss {z:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
