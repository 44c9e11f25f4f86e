"""Merge of two attention results over disjoint keys: what every ring of blocks does after each block.

    lse = log(exp(lse_a) + exp(lse_b)),    out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)

(Milakov and Gimelshein, arXiv 1805.02867; Liu et al., arXiv 2310.01889). Plain torch; the feature ring-attention-update puts
one operator in the place of `merge`, so callers name it through this module: ``attention_merge.merge(...)``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge ``new`` into ``out`` and ``lse``, in place.

    ``out`` [queries, batch, heads, width] and ``lse`` [batch, heads, queries] are wide and may be views of larger tensors;
    ``new_out`` has as many elements, in the order of ``out``, of any floating-point type. Rows that neither side saw have an
    lse of -inf and stay zero.
    """
    together = torch.logaddexp(lse, new_lse)
    finite = together.masked_fill(together == -torch.inf, 0)
    weights = [(side - finite).exp().permute(2, 0, 1)[..., None] for side in (lse, new_lse)]
    out.mul_(weights[0]).add_(new_out.reshape(out.shape) * weights[1])
    lse.copy_(together)
