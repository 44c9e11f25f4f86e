"""Which experts Sinkhorn routing in Megatron alone gives to tokens: ``python stock_sinkhorn.py``.

The router balances the tokens that a rank has. Under sequence parallelism that is a part of a micro-batch, so that the same
tokens go to other experts than in one process. Printed is the share of them, and needed is neither mindspeed nor a GPU.
"""

import torch
from megatron.core.transformer.moe.moe_utils import sinkhorn

TOKENS, EXPERTS, RANKS = 1024, 4, 2


def main() -> None:
    """Route the tokens in one piece, and in as many as there are ranks."""
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    whole = sinkhorn(logits).argmax(-1)
    parts = torch.cat([sinkhorn(part).argmax(-1) for part in logits.chunk(RANKS)])
    print(f"tokens of another expert: {float((whole != parts).float().mean()):.1%}")


if __name__ == "__main__":
    main()
