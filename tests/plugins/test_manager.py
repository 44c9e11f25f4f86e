from __future__ import annotations

from dataclasses import dataclass

import pytest

from mindspeed import registry
from mindspeed.planning.build_plan import manager_of
from mindspeed.plugins import Category, Feature, FeatureSpec, World, hookimpl
from mindspeed.plugins.feature import FeatureArgs
from mindspeed.plugins.manager import FeatureManager
from mindspeed.plugins.problems import MindSpeedError
from mindspeed.resolution.environment import made_up

ARGS, WORLD = FeatureArgs(), World({})


def feature(name, **hooks):
    spec = FeatureSpec(name, "made up", Category.TOOL)
    return type(name, (Feature,), {"spec": spec, **{key: hookimpl(hook) for key, hook in hooks.items()}})(ARGS, WORLD)


def test_results_come_in_plan_order_with_their_feature():
    manager = FeatureManager([feature("a", patches=lambda self: ["x"]), feature("b"), feature("c", patches=lambda self: ["y"])])
    assert manager.call("patches") == [("a", ["x"]), ("c", ["y"])]
    assert manager.owners("patches") == {"a", "c"}
    assert manager.owners("verify") == set()


def test_a_folded_hook_chains_the_value_in_plan_order():
    manager = FeatureManager(
        [
            feature("a", layer_spec=lambda self, spec, config: [*spec, "a"]),
            feature("b", layer_spec=lambda self, spec: [*spec, "b"]),
        ]
    )
    assert manager.fold("layer_spec", "spec", spec=["start"], config=None) == ["start", "a", "b"]


def test_an_error_in_a_hook_names_the_feature():
    def patches(self):
        raise RuntimeError("no idea")

    with pytest.raises(MindSpeedError) as caught:
        FeatureManager([feature("a", patches=patches)]).call("patches")
    assert str(caught.value) == "MS901 RuntimeError: no idea, raised by feature a in hook patches"


@pytest.mark.guards(31)
def test_a_hook_that_does_not_exist_names_the_feature():
    with pytest.raises(MindSpeedError, match="MS104 feature a has a hook that does not match its specification"):
        FeatureManager([feature("a", pathces=lambda self: [])])


def test_a_hook_with_a_foreign_argument_names_the_feature():
    with pytest.raises(MindSpeedError, match="MS104 feature a has a hook that does not match"):
        FeatureManager([feature("a", config_ready=lambda self, konfig: None)])


@dataclass
class Config:
    """Stands for what a hook is given to change."""

    value: int = 0


def changing(self, config):
    config.value = 1


@pytest.mark.parametrize(
    ("hook", "method", "arguments", "did_something"),
    [
        ("config_ready", lambda self, config: None, {"config": Config()}, False),
        ("config_ready", changing, {"config": Config()}, True),
        ("layer_spec", lambda self, spec: spec, {"spec": [1], "config": None}, False),
        ("layer_spec", lambda self, spec: [*spec], {"spec": [1], "config": None}, False),
        ("layer_spec", lambda self, spec: [*spec, 2], {"spec": [1], "config": None}, True),
        ("layer_spec", lambda self, spec: spec.append(2) or spec, {"spec": [1], "config": None}, True),
        ("schedule", lambda self, config: None, {"config": Config()}, False),
        ("schedule", lambda self, config: print, {"config": Config()}, True),
        ("model_built", lambda self, chunks: None, {"chunks": []}, True),
    ],
)
@pytest.mark.guards(16)
def test_a_hook_that_changes_nothing_was_called_and_did_nothing(hook, method, arguments, did_something):
    manager = FeatureManager([feature("a", **{hook: method})])
    manager.call(hook, **arguments)
    assert manager.calls["a", hook] == 1
    assert manager.effects["a", hook] == did_something


def test_a_plan_gets_new_feature_instances_whenever_it_is_activated():
    made = registry.plan(["rms-norm"], environment=made_up("cpu", "0.16.1"), world={"num_layers": 2})
    first, second = (manager_of(made, registry.catalog(), registry.base_features("cpu")) for _ in range(2))
    assert [feature.spec.name for feature in first.features] == [feature.spec.name for feature in second.features]
    assert set(map(id, first.features)).isdisjoint(map(id, second.features))
    assert not first.calls
    assert not first.effects
