"""Ends of documents, from the data set to the batch: the position ids of a sample restart with each document.

Position ids are what Megatron's loaders, broadcasts and scripts hand on anyway, so nothing else has to travel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed import plugins as ms
from mindspeed.problems import advice

if TYPE_CHECKING:
    from mindspeed.features.eod_reset.feature import EodResetArgs


def ends_of_positions(positions_BS: Tensor) -> Tensor:
    """The documents of rows in which every document begins with position 0. Raises MS335 where a row begins otherwise."""
    first = (positions_BS == 0).cpu()
    if not bool(first[:, 0].all()):
        text = "a row of position ids does not begin with 0, but every document must begin at position 0"
        fix = "give the position ids of whole rows, before they are split for context parallelism"
        raise ms.MindSpeedError([ms.Problem("MS335", text, fix=advice(fix))])
    length = first.shape[1]
    rows = [[*row.nonzero().flatten().tolist()[1:], length] for row in first]
    most = max(map(len, rows))
    return torch.tensor([row + [length] * (most - len(row)) for row in rows])


def _args() -> EodResetArgs:
    args: EodResetArgs = ms.active_feature("eod-reset").args
    return args


def with_documents_kept(post_init: Callable[..., Any]) -> Callable[..., Any]:
    """Around the ``__post_init__`` of a data set's configuration."""

    @wraps(post_init)
    def wrapped(config: Any) -> None:
        config.reset_position_ids, config.reset_attention_mask, config.create_attention_mask = True, True, False
        post_init(config)

    return wrapped


def with_positions_anew(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``_get_ltor_masks_and_position_ids(tokens, eod, reset positions, reset mask, mask loss, make mask)``."""

    @wraps(original)
    def wrapped(data: torch.Tensor, eod_token: int, *rest: Any) -> Any:
        _, _, eod_mask_loss, _ = rest
        mask, loss_mask, positions = original(data, eod_token, True, True, eod_mask_loss, False)
        if (length := _args().fixed_document_length) is not None:
            positions = torch.arange(len(data), device=data.device) % length
        return mask, loss_mask, positions

    return wrapped


def with_documents(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``get_batch_on_this_cp_rank(batch, ...)``: the ends of documents become the attention mask of the batch.

    Raises MS335 for position ids of which a row does not begin with 0.
    """

    @wraps(original)
    def wrapped(batch: dict[str, Any], *rest: Any, **named: Any) -> dict[str, Any]:
        positions = batch.get("position_ids")
        if positions is None or "attention_mask" not in batch:
            share: dict[str, Any] = original(batch, *rest, **named)
            return share
        ends = ends_of_positions(positions)
        share = original({**batch, "attention_mask": None, "position_ids": for_model(positions)}, *rest, **named)
        batch.update({**share, "attention_mask": ends})
        return batch

    return wrapped


def for_model(positions: torch.Tensor) -> torch.Tensor:
    """Positions as the model takes them."""
    if _args().reset_position_ids:
        return positions
    return torch.arange(positions.shape[1], device=positions.device).expand_as(positions).contiguous()


def with_positions_everywhere(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``get_batch_on_this_tp_rank``, which broadcasts positions on the first stage only.

    Its first argument is the data iterator, since Megatron 0.18 the whole batch, from which the last stage drops positions.
    """

    @wraps(original)
    def wrapped(*given: Any, **named: Any) -> dict[str, Any]:
        from megatron.core import parallel_state

        whole = next((argument for argument in (*given, named.get("batch")) if isinstance(argument, dict)), {})
        positions = whole.get("position_ids")
        batch: dict[str, Any] = original(*given, **named)
        positions = batch["position_ids"] if positions is None else positions
        group = parallel_state.get_tensor_model_parallel_group()
        if group.size() > 1:
            like = next(x for name in ("position_ids", "labels", "tokens") if (x := batch.get(name)) is not None)
            positions = positions if group.rank() == 0 else torch.empty_like(like)
            torch.distributed.broadcast(positions, parallel_state.get_tensor_model_parallel_src_rank(), group=group)
        batch["position_ids"] = positions
        return batch

    return wrapped


def every_stage(vp_stage: int | None) -> bool:
    """Replaces ``is_first_or_last_pipeline_stage``, which decides in Megatron-LM where data are read."""
    return True
