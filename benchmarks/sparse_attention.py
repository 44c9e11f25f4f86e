"""Time of a layer's sparse attention with the loss of its indexer: keys and values of heads, and latent vectors.

``python -m benchmarks.sparse_attention 2048`` prints seconds of processor time, forward and backward, with DeepSeek's
widths (128 + 64 and 128, latent vectors of 512) in fp32. The indexer is left out: its scores are given.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

import mindspeed

RANK: Final = 512
KEY, ROPE, VALUE = 128, 64, 128
SCALE: Final = (KEY + ROPE) ** -0.5


def measured(tokens: int, topk: int, heads: int, selected_loss: bool) -> dict[str, float]:
    """Return the least seconds of two runs of each form, whose gradients agree."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    from mindspeed.features.mla_split.absorbed import Absorption, divergence, sparse_attention

    torch.manual_seed(0)
    query = torch.randn(tokens, 1, heads, KEY + ROPE)
    keys, weight = torch.randn(tokens, 1, RANK + ROPE), torch.randn(heads * (KEY + VALUE), RANK) * RANK**-0.5
    scores = torch.randn(1, tokens, tokens) + torch.full((tokens, tokens), -torch.inf).triu(1)
    selected = scores.topk(topk, -1)[1]
    given = [tensor.requires_grad_() for tensor in (query, keys, weight, scores)]
    upstream = [torch.randn(tokens, 1, heads * VALUE), torch.ones(())]
    groups: Any = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    absorption = Absorption(KEY, SCALE, "selected" if selected_loss else "all")

    def of_heads() -> list[Tensor]:
        made = (keys[..., :RANK] @ weight.t()).unflatten(-1, (heads, -1))  # type: ignore[no-untyped-call]
        key, value = made.split([KEY, VALUE], -1)
        key = torch.cat([key, keys[..., None, RANK:].expand(-1, -1, heads, -1)], -1)
        loss = dsa.compute_dsa_indexer_loss(
            scores * 1, selected, query.detach(), key.detach(), SCALE, 1.0, selected_loss, groups
        )
        return [dsa.unfused_dsa_fn(query, key, value, selected, SCALE), loss]

    def of_latent_vectors() -> list[Tensor]:
        output, target = sparse_attention(query, keys, weight, selected, absorption)
        assert target is not None
        return [output, divergence(scores.gather(-1, selected) if selected_loss else scores, target)]

    forms: dict[str, Callable[[], list[Tensor]]] = {"keys of heads": of_heads, "latent vectors": of_latent_vectors}
    seconds: dict[str, float] = {}
    found = []
    for name, form in [*forms.items()] * 2:
        began = time.process_time()
        found.append(torch.autograd.grad(form(), given, upstream))
        seconds[name] = min(seconds.get(name, torch.inf), time.process_time() - began)
    for one, other in zip(*found[:2], strict=True):
        assert float((one - other).abs().max()) < 1e-5 * float(one.abs().max())
    return seconds


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens", type=int)
    parser.add_argument("--topk", type=int, default=128)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--selected-loss", action="store_true", help="the loss of the indexer is over the selected keys")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mindspeed.activate(mindspeed.plan(platform="cpu"))
    seconds = measured(options.tokens, options.topk, options.heads, options.selected_loss)
    print(", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()))


if __name__ == "__main__":
    main()
