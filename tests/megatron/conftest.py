"""Features of a few hooks as the active ones, without a plan that was resolved."""

from collections.abc import Callable
from typing import Any

import pytest

from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.runtime import session
from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, World, hookimpl
from mindspeed.plugins.manager import FeatureManager


@pytest.fixture
def activate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make features with these hooks the active ones: ``activate(first={"schedule": function})``."""

    def make(**features: dict[str, Any]) -> None:
        instances = []
        for name, hooks in features.items():
            members: dict[str, Any] = {hook: hookimpl(function) for hook, function in hooks.items()}
            members["spec"] = FeatureSpec(name, Category.TOOL)
            instances.append(type(name, (Feature,), members)(FeatureArgs(), World({})))
        plan = ActivationPlan(features=(), world=World({}))
        monkeypatch.setattr(session, "_session", session.Session(plan, FeatureManager(instances), applied=None, proof=None))

    return make
