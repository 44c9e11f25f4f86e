"""The seams on Megatron-LM's training loop, with functions that stand for Megatron-LM's."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest

from mindspeed.megatron import training_hook_wrappers as wiring
from mindspeed.megatron.hook_points import ARGUMENT_HOOK_POINTS, HOOK_POINTS, TRAINING_HOOK_POINTS, hook_points_for
from mindspeed.planning.plan import ActivationPlan
from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, World, hookimpl
from mindspeed.plugins.manager import FeatureManager
from mindspeed.runtime import session
from tests.megatron_lm import stub


@pytest.fixture
def activate(monkeypatch):
    """Make features with these hooks the active ones: ``activate(first={"save_extra": function})``."""

    def make(**features: dict[str, Any]) -> None:
        instances = []
        for name, hooks in features.items():
            members: dict[str, Any] = {hook: hookimpl(function) for hook, function in hooks.items()}
            members["spec"] = FeatureSpec(name, f"the feature {name}", Category.TOOL)
            instances.append(type(name, (Feature,), members)(FeatureArgs(), World({})))
        plan = ActivationPlan(features=(), world=World({}))
        monkeypatch.setattr(session, "_session", session.Session(plan, FeatureManager(instances), applied=None, proof=None))

    return make


def test_only_a_plan_for_the_training_loop_has_its_seams(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(stub.build(tmp_path)))
    hooks = ["around_train_step", "save_extra", "load_extra", "optimizer_built"]
    assert hook_points_for(hooks, []) == [HOOK_POINTS["optimizer_built"]]
    assert hook_points_for([], [], training=True) == [ARGUMENT_HOOK_POINTS[0]], "the stub reads no YAML"
    loop = [seam for seams in TRAINING_HOOK_POINTS.values() for seam in seams]
    assert hook_points_for(hooks, [], training=True) == [HOOK_POINTS["optimizer_built"], ARGUMENT_HOOK_POINTS[0], *loop]


@pytest.mark.guards(31)
def test_a_step_runs_inside_what_features_put_around_it(activate, monkeypatch):
    monkeypatch.setattr(wiring, "_steps_done", lambda: 7)
    order = []

    @contextmanager
    def around(self, state):
        order.append((self.spec.name, state.step, state.chunks, state.optimizer, state.scheduler))
        yield
        order.append(f"{self.spec.name} after")

    activate(first={"around_train_step": around}, second={"around_train_step": around})
    step = wiring.with_train_step(lambda *args, **kwargs: order.append((args, kwargs)) or "losses")
    assert step("forward", "data", ["chunk"], "adam", "cosine", "config", iteration=3) == "losses"
    assert order == [
        ("first", 7, ["chunk"], "adam", "cosine"),
        ("second", 7, ["chunk"], "adam", "cosine"),
        (("forward", "data", ["chunk"], "adam", "cosine", "config"), {"iteration": 3}),
        "second after",
        "first after",
    ]


def test_what_features_add_to_a_checkpoint_comes_back_to_them(activate):
    back = []
    activate(
        first={
            "save_extra": lambda self, state: {"calls": state.step},
            "load_extra": lambda self, state, data: back.append((state.step, state.optimizer, data)),
        },
        second={"load_extra": lambda self, state, data: back.append("nothing was saved")},
    )
    generate = wiring.with_save_extra(lambda args, model, optimizer, scheduler, rng, iteration: {"model": "weights"})
    assert generate(None, ["chunk"], "adam", "cosine", None) == {"model": "weights"}, "this asks for the shape of a checkpoint"
    saved = generate(None, ["chunk"], "adam", "cosine", None, iteration=5)
    assert saved == {"model": "weights", "mindspeed": {"first": {"calls": 5}}}
    read = wiring.with_load_extra(lambda folder: (saved, folder, False))
    load = wiring.with_loaded_checkpoint(lambda model, optimizer, scheduler, load_arg="load": (read("ckpt"), (5, 0))[1])
    assert load(["chunk"], "adam", "cosine") == (5, 0)
    assert back == [(5, "adam", {"calls": 5})]


def test_a_checkpoint_of_a_feature_that_is_gone_loads_without_it(activate):
    activate()
    read = wiring.with_load_extra(lambda folder: ({"mindspeed": {"gone": {"calls": 5}}}, folder))
    load = wiring.with_loaded_checkpoint(lambda model, optimizer, scheduler: (read("ckpt"), (5, 0))[1])
    assert load(["chunk"], "adam", "cosine") == (5, 0)


def test_wrappers_that_outlive_their_plan_do_what_the_originals_do(monkeypatch):
    monkeypatch.setattr(wiring, "_steps_done", lambda: 0)
    assert wiring.with_plan_arguments(lambda args, defaults: (args, defaults))("args", {}) == ("args", {})
    assert wiring.with_train_step(lambda *args: args)(1, 2, [3], 4, 5) == (1, 2, [3], 4, 5)
    assert wiring.with_save_extra(lambda *args: {"model": args[1]})("args", [1], 2, 3, 4) == {"model": [1]}
    assert wiring.with_loaded_checkpoint(lambda *args: args)([1], 2, 3) == ([1], 2, 3)
