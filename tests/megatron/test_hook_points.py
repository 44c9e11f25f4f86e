from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed import registry
from mindspeed.inspection.config_arguments import PLACES
from mindspeed.inspection.sites import find_site
from mindspeed.megatron import hook_wrappers
from mindspeed.megatron.hook_points import HOOK_POINTS, PREDICTION, TRAINING_HOOK_POINTS, MegatronHookPoints, hook_points_for
from mindspeed.planning.plan import ActivationPlan
from mindspeed.platforms import PLATFORMS
from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, MindSpeedError, Patch, Replace, World, hookimpl
from mindspeed.plugins.discovery import Catalog, DiscoveredFeature
from mindspeed.plugins.hookspecs import HOOK_CLASSES
from mindspeed.plugins.manager import FeatureManager
from mindspeed.registry import base_features
from mindspeed.resolution.environment import made_up
from mindspeed.resolution.request import Layer
from mindspeed.runtime import session

CALLED_BY_A_TRAINING_LOOP = set(TRAINING_HOOK_POINTS)
CALLED_BY_MINDSPEED = {"patches", "megatron_args", "verify"}


@pytest.fixture
def activate(monkeypatch):
    """Make features with these hooks the active ones: ``activate(first={"schedule": function})``."""

    def make(**features: dict[str, Any]) -> None:
        instances = []
        for name, hooks in features.items():
            members: dict[str, Any] = {hook: hookimpl(function) for hook, function in hooks.items()}
            members["spec"] = FeatureSpec(name, f"the feature {name}", Category.TOOL)
            instances.append(type(name, (Feature,), members)(FeatureArgs(), World({})))
        plan = ActivationPlan(features=(), world=World({}))
        monkeypatch.setattr(session, "_session", session.Session(plan, FeatureManager(instances), applied=None, proof=None))

    return make


def test_only_the_hooks_and_arguments_of_a_plan_are_wired():
    assert hook_points_for([], []) == []
    assert hook_points_for(["model_built", "patches"], []) == [HOOK_POINTS["model_built"]]
    assert hook_points_for(["layer_spec"], []) == [HOOK_POINTS["layer_spec"], PREDICTION]
    assert [patch.target for patch in hook_points_for([], ["overlap_param_gather"])] == [
        "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig.__post_init__",
        "megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
    ]
    assert [patch.value for patch in hook_points_for([], ["tensor_model_parallel_size"])] == [
        "mindspeed.megatron.argument_overrides:override_fields",
        "mindspeed.megatron.argument_overrides:override_parameters",
    ]


def test_every_place_is_wrapped_when_nothing_is_known_of_megatron(monkeypatch):
    monkeypatch.setattr("mindspeed.megatron.hook_points.arguments_of", lambda version: None)
    assert [patch.target for patch in hook_points_for([], ["anything"])] == [place.target for place in PLACES]
    assert hook_points_for([], []) == []


def test_every_hook_has_a_seam_or_another_caller():
    hooks = {name for group in HOOK_CLASSES for name in vars(group) if not name.startswith("_")}
    assert hooks == HOOK_POINTS.keys() | CALLED_BY_A_TRAINING_LOOP | CALLED_BY_MINDSPEED


def test_every_seam_and_every_place_of_arguments_exists_in_megatron():
    targets = [seam.target for seam in (*HOOK_POINTS.values(), PREDICTION)] + [place.target for place in PLACES]
    assert [target for target in targets if find_site(target) is None] == []


def test_the_base_plan_of_every_platform_has_the_seams():
    assert all(MegatronHookPoints in base_features(platform) for platform in PLATFORMS)


@pytest.mark.parametrize("hook", sorted(HOOK_POINTS.keys() - {"schedule"}))
def test_a_wrapper_that_outlives_its_plan_does_what_the_original_does(hook, monkeypatch):
    monkeypatch.setattr(hook_wrappers, "group_sizes", dict)
    calls = []

    def original(*args: Any) -> str:
        calls.append(args)
        return "result"

    getattr(hook_wrappers, HOOK_POINTS[hook].value.partition(":")[2])(original)("first", "second")
    assert calls == [("first", "second")]


def test_a_configuration_is_shown_after_megatron_accepted_it(activate):
    order = []
    activate(first={"config_ready": lambda self, config: order.append(("hook", config))})
    hook_wrappers.with_config_ready(lambda config: order.append(("megatron", config)))("config")
    assert order == [("megatron", "config"), ("hook", "config")]


@pytest.mark.guards(31)
def test_groups_are_announced_after_they_exist_and_before_they_go(activate, monkeypatch):
    order = []
    monkeypatch.setattr(hook_wrappers, "group_sizes", lambda: {"tp": 2})
    monkeypatch.setattr(hook_wrappers, "get_group", lambda name: f"group {name}")
    activate(
        first={
            "groups_created": lambda self, sizes, get_group: order.append(("created", sizes, get_group("tp"))),
            "groups_destroyed": lambda self: order.append("destroyed"),
        }
    )
    hook_wrappers.with_groups_created(lambda size: order.append(size))(2)
    hook_wrappers.with_groups_destroyed(lambda: order.append("megatron destroys"))()
    assert order == [2, ("created", {"tp": 2}, "group tp"), "destroyed", "megatron destroys"]


def test_options_of_a_group_come_from_the_feature_that_has_some(activate):
    get_options = hook_wrappers.with_group_options(lambda name, configs: f"megatron's for {name}")
    activate(
        quiet={"group_options": lambda self, group: None},
        loud={"group_options": lambda self, group: "ours" if group == "tp" else None},
    )
    assert [get_options(name, {}) for name in ("tp", "dp")] == ["ours", "megatron's for dp"]


def test_layer_specs_are_chained_in_plan_order(activate):
    activate(
        first={"layer_spec": lambda self, spec, config: [*spec, f"first {config}"]},
        second={"layer_spec": lambda self, spec, config: [*spec, "second"]},
    )
    get_submodules = hook_wrappers.with_layer_spec(lambda config, spec, vp_stage=None: [spec])
    assert get_submodules("config", "given", vp_stage=0) == ["given", "first config", "second"]


@pytest.mark.guards(31)
def test_the_model_is_announced_before_the_optimizer(activate):
    order = []
    activate(
        first={
            "model_built": lambda self, chunks: order.append(("model", chunks)),
            "optimizer_built": lambda self, optimizer: order.append(("optimizer", optimizer)),
        }
    )

    def get_megatron_optimizer(config: Any, model_chunks: Any, **kwargs: Any) -> str:
        order.append("megatron")
        return "adam"

    wrapped = hook_wrappers.with_optimizer_built(hook_wrappers.with_model_built(get_megatron_optimizer))
    assert wrapped("config", model_chunks=["chunk"], use_gloo_process_groups=True) == "adam"
    assert order == [("model", ["chunk"]), "megatron", ("optimizer", "adam")]


def test_a_schedule_is_chosen_when_the_model_is_known(activate, monkeypatch):
    monkeypatch.setattr(hook_wrappers, "config_of", lambda model: model.config)
    forward_backward = hook_wrappers.with_schedule(lambda: lambda **arguments: "megatron's")()
    models = [SimpleNamespace(config="deep"), SimpleNamespace(config="flat")]
    assert [forward_backward(model=model) for model in models] == ["megatron's", "megatron's"]
    activate(first={"schedule": lambda self, config: (lambda **arguments: "ours") if config == "deep" else None})
    assert [forward_backward(model=model) for model in models] == ["ours", "megatron's"]


def test_two_features_that_answer_for_one_thing_are_named(activate):
    both = {"group_options": lambda self, group: self.spec.name}
    activate(first=both, second=both)
    with pytest.raises(MindSpeedError) as error:
        hook_wrappers.with_group_options(lambda name, configs: None)("tp", {})
    assert str(error.value) == ("MS402 first and second both give options for the group tp\n  fix: take out one of them")


class _Replacing(Feature[FeatureArgs]):
    """Puts a function of its own in place of one that has a seam, and wants the seam's hook."""

    spec = FeatureSpec("replacing", "a test", Category.TOOL)

    @hookimpl
    def patches(self) -> list[Patch]:
        return [Replace("megatron.core.parallel_state:initialize_model_parallel", f"{__name__}:own_groups", "a test")]

    @hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Any) -> None:
        _called.append("hook")


_called: list[str] = []


def own_groups(*args: Any, **kwargs: Any) -> None:
    _called.append("replacement")


def test_a_seam_stays_around_what_a_feature_puts_in_place_of_the_original(monkeypatch):
    known = Catalog([DiscoveredFeature("replacing", "acme", "1", "acme:Replacing", _Replacing)])
    plan = registry.resolve([Layer("test", features=("replacing",))], made_up("cpu", "0.16.1"), known)
    monkeypatch.setattr(registry, "catalog_for", lambda names: known)
    monkeypatch.setattr(hook_wrappers, "group_sizes", dict)
    registry.activate(plan)
    try:
        from megatron.core import parallel_state

        _called.clear()
        parallel_state.initialize_model_parallel()
    finally:
        registry.deactivate()
    assert _called == ["replacement", "hook"]
