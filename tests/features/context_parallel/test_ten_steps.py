"""Ten steps of every algorithm of context parallelism against stock Megatron in one process, without dropout, in fp32."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.verification.case import build_case
from mindspeed.workbench.verification.comparison import Tolerances, compare, losses_by_step
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.record import RankResult

pytestmark = pytest.mark.long

STEPS, BOUND = 10, 1e-5
SIX_HEADS = {"num_attention_heads": 6, "num_query_groups": 6, "hidden_size": 48}
FOUR = {"hybrid-attention": {"ulysses_degree": 2}}


@pytest.mark.parametrize(
    ("algorithm", "size", "settings", "world"),
    [
        ("ring-attention", 2, {}, {}),
        ("ulysses-attention", 2, {}, {"seq_length": 26}),
        ("kv-allgather-cp", 2, {}, {"seq_length": 28}),
        ("adaptive-cp", 2, {}, {"seq_length": 22}),
        ("ring-attention", 3, {}, {"seq_length": 42}),
        ("ulysses-attention", 3, {}, {"seq_length": 27, **SIX_HEADS}),
        ("kv-allgather-cp", 3, {}, {"seq_length": 30}),
        ("ring-attention", 4, {"ring-attention": {"window": 2}}, {"seq_length": 40}),
        ("hybrid-attention", 4, FOUR, {"seq_length": 56}),
    ],
)
def test_losses_gradients_and_weights_of_ten_steps_are_those_of_stock_megatron(
    pool: WorkerPool, algorithm: str, size: int, settings: dict[str, Any], world: dict[str, Any]
) -> None:
    layer = Layer("test", settings={"context-parallel": {"size": size}, **settings}, world=world)
    question = build_case((algorithm,), [layer], nproc=size)
    assert question.recipe.shape.dropout == 0
    recipe = replace(question.recipe, steps=STEPS)
    stock = pool.run_once(question.baseline, recipe, 1)
    found = pool.run(question.plan, recipe, size)
    assert [check for check in compare(stock, found, Tolerances(BOUND, BOUND, BOUND)) if not check.holds] == []
    assert len(losses_by_step(found)) == STEPS
    assert gradient_norm(found) == pytest.approx(gradient_norm(stock), rel=BOUND)


def gradient_norm(records: Sequence[RankResult]) -> float:
    """The norm of the gradients of all parameters in the first step, as they come to the optimizer."""
    whole: dict[str, Any] = {}
    for piece in (piece for record in records for piece in record.pieces if piece.kind == "gradient"):
        whole.setdefault(piece.name, np.zeros(piece.shape))[piece.index] = piece.values
    return float(np.sqrt(sum((values**2).sum() for values in whole.values())))
