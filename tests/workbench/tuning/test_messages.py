"""The messages that the search foretells of a step are those that Megatron sends in one."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from mindspeed import registry
from mindspeed.plugins.discovery import discover
from mindspeed.workbench.tuning.layout_jobs import FixedRequest
from mindspeed.workbench.tuning.search import Question, Scores
from mindspeed.workbench.tuning.space import SIZES, Choice, Layouts
from mindspeed.workbench.tuning.time import DEFAULTS, Machine, exposed
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.shape import LLAMA, MOE, GptShape, Recipe
from tests.workbench.tuning.messages import sent

FULL = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}
OF_TP = ("TENSOR_MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "TENSOR_AND_CONTEXT_PARALLEL_GROUP")
OF_EP = ("EXPERT_MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")


@dataclass(frozen=True)
class Case:
    """A layout of two ranks: what it sends over one kind of group, ``calls`` and ``bytes`` within a share of the prediction.

    With ``both_ends`` a rank sends as much as it receives and counts both; foretold are the bytes that it sends.
    """

    group: str
    names: tuple[str, ...]
    shape: GptShape = LLAMA
    sizes: dict[str, int] = field(default_factory=dict)
    choice: Choice = field(default_factory=Choice)
    calls: float = 0.0
    bytes: float = 0.05
    both_ends: bool = False


CASES = {
    "tp": Case("tp", OF_TP, sizes={"tp": 2}),
    "tp, recomputed": Case("tp", OF_TP, sizes={"tp": 2}, choice=Choice(("recompute",), FULL)),
    "tp, experts": Case(
        "tp", OF_TP, MOE, {"tp": 2}, Choice(("sequence-parallel",)), calls=0.06, bytes=1.0
    ),  # a gather counts as the whole
    "ep": Case("ep", OF_EP, MOE, {"ep": 2}, bytes=1.4),  # and what a rank sends itself, and probabilities
    "cp": Case("cp", ("CONTEXT_PARALLEL_GROUP",), sizes={"cp": 2}, choice=Choice(("ring-attention",)), both_ends=True),
    "pp": Case("pp", ("PIPELINE_MODEL_PARALLEL_GROUP", "default_pg"), sizes={"pp": 2}, calls=0.15, bytes=0.15),
    "pp, two chunks": Case(
        "pp", ("PIPELINE_MODEL_PARALLEL_GROUP", "default_pg"), sizes={"pp": 2, "vpp": 2}, calls=0.15, bytes=0.15
    ),
}


@pytest.mark.parametrize("name", ["tp", *(pytest.param(name, marks=pytest.mark.long) for name in list(CASES)[1:])])
def test_foretold_messages_are_sent(pool: WorkerPool, name: str) -> None:
    case = CASES[name]
    recipe = Recipe(case.shape, steps=1, global_batch_size=8)
    world = {**recipe.world(), "world_size": 2, **case.sizes}
    plan = registry.plan(list(case.choice.features), {k: dict(v) for k, v in case.choice.settings.items()}, world=world)

    moved = pool.call(sent, 2, recipe, plan=plan)[0]

    work = foretold(case, recipe)
    counts = [moved[group] for group in case.names if group in moved]
    assert sum(calls for calls, _ in counts) == pytest.approx(work[f"{case.group}_call"], rel=case.calls)
    assert sum(size for _, size in counts) / (1 + case.both_ends) == pytest.approx(work[f"{case.group}_byte"], rel=case.bytes)


def foretold(case: Case, recipe: Recipe, **more: Any) -> dict[str, float]:
    world = {**recipe.world(), "platform": "cpu", "world_size": 2, "megatron": "0.16.1", "kv_channels": 8, **more}
    sizes = {name: [case.sizes.get(name, 1)] for name in SIZES}
    question = Question(Layouts(world, sizes), [case.choice], FixedRequest(), Machine(DEFAULTS["cpu"]))
    work = Scores(question, discover(only=())).work(case.choice)
    return {kind: float(np.asarray(values).reshape(-1)[0]) for kind, values in work.items()}


def test_messages_between_nodes_are_counted_apart() -> None:
    case = replace(CASES["tp"], sizes={"tp": 2})
    within = foretold(case, Recipe(LLAMA, global_batch_size=8), world_size=8, ranks_per_node=2)
    across = foretold(case, Recipe(LLAMA, global_batch_size=8), world_size=8, ranks_per_node=1)
    assert within["tp_call"] == across["node_call"] - within["node_call"] > 0
    assert within["dp_byte"] == 0
    assert within["node_byte"] > 0


def test_reductions_count_as_far_as_the_backward_pass_is_shorter() -> None:
    work = foretold(replace(CASES["tp"], sizes={}, choice=Choice(("async-ddp",))), Recipe(LLAMA, global_batch_size=8))
    assert work["dp_byte"] == 0 < work["dp_reduce"]
    free, slow = (Machine({**DEFAULTS["cpu"], "dp_byte": seconds}) for seconds in (1e-12, 1.0))
    assert exposed(work, free)["dp_byte"] == 0
    assert 0 < work["dp_reduce"] - exposed(work, slow)["dp_byte"] < 1  # less than the bytes of a second
