"""The mask that all layers of a process share: the rule of visible keys, and the one tensor made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module

import torch
from torch import Tensor

from mindspeed.plugins import MindSpeedError, Problem
from mindspeed.problems import advice


@dataclass(frozen=True, slots=True)
class MaskRule:
    """``kind`` is causal, sliding-window, prefix, or ``package.module:function`` for a function of one's own.

    A window's ``width`` counts the query itself. Tokens before ``prefix`` are seen by all.
    """

    kind: str = "causal"
    width: int | None = None
    prefix: int | None = None

    @property
    def is_own(self) -> bool:
        """True where a function of the user makes the mask."""
        return ":" in self.kind


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
    module, _, function = name.partition(":")
    try:
        make: Callable[[int], Tensor] = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise _refused(f"{name} cannot be imported: {error}") from error
    mask = make(tokens)
    given = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    if given != f"torch.bool {(tokens, tokens)}":
        raise _refused(
            f"{name} returned {given}, but a mask of type torch.bool and shape {(tokens, tokens)} is expected, "
            "True where hidden"
        )
    return mask


def _refused(sentence: str) -> MindSpeedError:
    fix = "name a function of the number of tokens as package.module:function"
    return MindSpeedError([Problem("MS332", f"shared attention mask: {sentence}", fix=advice(fix))])
