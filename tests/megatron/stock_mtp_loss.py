"""How much a token weighs in the loss of multi-token prediction in Megatron alone: ``python stock_mtp_loss.py``.

Two sequences of 4 and 2 tokens with a loss per token: each on a replica of its own, and both in one process. Printed is the
gradient of one token of each by the loss of multi-token prediction. Needs Megatron-LM 0.19 or newer, no mindspeed, no GPU and
no Transformer Engine.
"""

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, process_mtp_loss

LENGTH = 6
CONFIG = SimpleNamespace(mtp_num_layers=1, mtp_loss_scaling_factor=1.0, calculate_per_token_loss=True, mtp_detach_heads=False)


def logits(hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    return hidden, None


def loss(labels: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return hidden.squeeze(-1).transpose(0, 1)


def gradients(*tokens: int) -> list[float]:
    """The gradient of the first token of each sequence, of which this many tokens count."""
    mask = torch.stack([(torch.arange(LENGTH) < number).float() for number in tokens])
    hidden = torch.zeros(2 * LENGTH, len(tokens), 1, requires_grad=True)
    labels = torch.zeros(len(tokens), LENGTH, dtype=torch.int64)
    process_mtp_loss(hidden, labels, mask, logits, None, None, False, loss, CONFIG).sum().backward()
    return hidden.grad[LENGTH, :, 0].tolist()


def main() -> None:
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    apart, together = [*gradients(4), *gradients(2)], gradients(4, 2)
    print(f"on two replicas: {apart[0]:.3f} and {apart[1]:.3f}, in one process: {together[0]:.3f} and {together[1]:.3f}")


if __name__ == "__main__":
    main()
