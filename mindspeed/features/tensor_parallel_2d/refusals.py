"""Optimizers and options of a model that weights with two split dimensions do not fit. Light, without torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from mindspeed.plugins import MindSpeedError, Problem
from mindspeed.plugins.fixes import advice

_NAME = "tensor-parallel-2d"


def refuse_muon(optimizer: Any) -> None:
    """Refuse a built optimizer that is, or contains, one that orthogonalizes weights. Raises MS304."""
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    if any("muon" in str(getattr(getattr(member, "config", None), "optimizer", "")) for member in members):
        raise _muon_refused()


def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes a Muon optimizer. Raises MS304."""

    @wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise _muon_refused()

    return refuse


def refuse_model(config: Any) -> None:
    """Refuse options of a model under which its linear layers have other inputs or weights. Raises MS304."""
    shards = getattr(config, "gtp_weight_remat_size", 1)
    problems = []
    if getattr(config, "moe_shared_expert_overlap", False):
        text = "moe_shared_expert_overlap is set, under which shared experts do without their collectives"
        problems.append(_problem(text, "remove --moe-shared-expert-overlap"))
    if shards > 1:
        text = f"gtp_weight_remat_size is {shards}: Megatron splits each weight over as many ranks more, along one dimension"
        problems.append(_problem(text, "remove --tensor-parallel-num-weight-shards"))
    if problems:
        raise MindSpeedError(problems)


def _problem(text: str, fix: str) -> Problem:
    return Problem("MS304", f"{_NAME}: {text}", (_NAME,), fix=advice(fix))


def _muon_refused() -> MindSpeedError:
    text = "Muon reads one split dimension of a weight, and the weights of linear layers are split along both"
    return MindSpeedError([_problem(text, f"--optimizer adam, or remove {_NAME}")])
