"""The mask that all layers of a process share: the one tensor that is made of a rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from mindspeed.context_parallel.mask_rules import MASKS, MaskRule, own_masks
from mindspeed.plugins import MindSpeedError, Problem
from mindspeed.problems import advice


@lru_cache(maxsize=4)
def mask_of(rule: MaskRule, tokens: int, device: torch.device) -> Tensor:
    """The mask [tokens, tokens], True where hidden; made once. Raises MS332 for a function that gives none."""
    with torch.inference_mode(False):  # one that is made in inference mode could not be used in training
        return make_mask(rule, tokens, device)


def make_mask(rule: MaskRule, tokens: int, device: torch.device) -> Tensor:
    """A new mask, as `mask_of` gives it."""
    if rule.is_own:
        return _own(rule.kind, tokens).to(device)
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu_(1)
    if rule.width is not None:
        mask |= torch.ones_like(mask).tril_(-rule.width)
    if rule.prefix is not None:
        mask[:, : rule.prefix] = False
    return mask


def _own(name: str, tokens: int) -> Tensor:
    found = own_masks().get(name)
    if found is None:
        raise _refused(f"no package adds {name}")
    make: Callable[[int], Tensor] = found.load()
    mask = make(tokens)
    given = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    if given != f"torch.bool {(tokens, tokens)}":
        raise _refused(
            f"{name} returned {given}, but a mask of type torch.bool and shape {(tokens, tokens)} is expected, "
            "True where hidden"
        )
    return mask


def _refused(sentence: str) -> MindSpeedError:
    fix = f"name a function of the number of tokens in the entry-point group {MASKS}"
    return MindSpeedError([Problem("MS332", f"shared attention mask: {sentence}", fix=advice(fix))])
