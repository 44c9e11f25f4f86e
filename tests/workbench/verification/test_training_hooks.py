"""Verification trains through the hooks of a training loop, as `mindspeed pretrain` does."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.runtime import session
from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, World, hookimpl
from mindspeed.plugins.manager import FeatureManager
from mindspeed.workbench.verification import training


class Around(Feature[FeatureArgs]):
    """Acts only around the steps of a training loop."""

    spec = FeatureSpec("around", Category.TOOL)

    @hookimpl
    @contextmanager
    def around_train_step(self, state: Any) -> Any:
        ORDER.append(("before", state.step, state.chunks, state.optimizer))
        yield
        ORDER.append("after")

    @hookimpl
    def step_metrics(self, state: Any) -> dict[str, float]:
        ORDER.append(("metrics", state.step))
        return {"steps": state.step}


ORDER: list[Any] = []


def test_a_feature_that_acts_only_around_a_training_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = FeatureManager([Around(FeatureArgs(), World({}))])
    plan = ActivationPlan(features=(), world=World({}))
    monkeypatch.setattr(session, "_session", session.Session(plan, manager, applied=None, proof=None))  # type: ignore[arg-type]
    run = training._Run.__new__(training._Run)
    run.recipe, run.chunks, run.optimizer = SimpleNamespace(steps=2), ["chunk"], "adam"  # type: ignore[assignment]
    monkeypatch.setattr(training._Run, "train_step", lambda self, step: ORDER.append(f"step {step}"))
    monkeypatch.setattr(training._Run, "record_weights", lambda self: None)
    monkeypatch.setattr(training.dist, "get_rank", lambda: 0)
    ORDER.clear()
    run.train()
    assert ORDER == [
        ("before", 0, ["chunk"], "adam"),
        "step 0",
        "after",
        ("metrics", 1),
        ("before", 1, ["chunk"], "adam"),
        "step 1",
        "after",
        ("metrics", 2),
    ]
    assert manager.effects["around", "around_train_step"] == 2
