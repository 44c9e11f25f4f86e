"""What the global auxiliary loss of Megatron alone depends on: ``torchrun --nproc-per-node 2 stock_global_aux_loss.py``.

``global_aux_loss`` averages the tokens of each expert over the micro-batches of a step that came so far, on all ranks. Two
ranks with a micro-batch each have seen both at the first one, and one process has not: the same batch has another loss.
Printed is the norm of the router's gradient over that of one process, which is 1 where the layout changes nothing. Needs no
mindspeed, no GPU and no Transformer Engine.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

TOKENS, HIDDEN, EXPERTS = 16, 8, 4


def gradient(kind: str, micro_batches: list[torch.Tensor], groups: Any, ranks: int) -> torch.Tensor:
    """The mean gradient of the router's weight over a step of two micro-batches, by its losses alone."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        add_bias_linear=False,
        num_moe_experts=EXPERTS,
        moe_router_load_balancing_type=kind,
        moe_aux_loss_coeff=1.0,
        use_cpu_initialization=True,
    )
    router = TopKRouter(config, groups)
    router.weight.data = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1))
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    for rows in micro_batches:
        probs, _ = router.routing(torch.nn.functional.linear(rows, router.weight))
        (probs.sum() * 0).backward()
    total = router.weight.grad
    if ranks > 1:
        dist.all_reduce(total)
    return total / 2


def main() -> None:
    """Print a line for each kind of loss on rank 0."""
    dist.init_process_group("gloo")
    torch.cuda.current_device = _cpu  # where the counts of tokens are
    batches = [torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3)]
    for kind in ("aux_loss", "global_aux_loss"):
        parallel_state.initialize_model_parallel()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        shared = gradient(kind, [batches[dist.get_rank()]], groups, 2)
        parallel_state.destroy_model_parallel()
        groups.tp = groups.cp = groups.tp_cp = groups.tp_dp_cp = dist.new_subgroups(1)[0]
        whole = gradient(kind, batches, groups, 1)
        if dist.get_rank() == 0:
            print(f"{kind}: {float(shared.norm() / whole.norm()):.3f}")


def _cpu() -> torch.device:
    return torch.device("cpu")


if __name__ == "__main__":
    main()
