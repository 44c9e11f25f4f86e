import copy
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from mindspeed import registry
from mindspeed.engine.planning.build_plan import manager_of
from mindspeed.engine.resolution.environment import made_up
from mindspeed.plugins import Category, Feature, FeatureSpec, World, hookimpl
from mindspeed.plugins.feature import FeatureArgs
from mindspeed.plugins.hookspecs import HOOKS
from mindspeed.plugins.manager import FeatureManager
from mindspeed.problems import MindSpeedError
from mindspeed.workbench.pages.reference import ANSWERS, CALLERS

ARGS, WORLD = FeatureArgs(), World({})


def feature(name, **hooks):
    spec = FeatureSpec(name, Category.TOOL)
    return type(name, (Feature,), {"spec": spec, **{key: hookimpl(hook) for key, hook in hooks.items()}})(ARGS, WORLD)


def test_results_come_in_plan_order_with_their_feature():
    manager = FeatureManager([feature("a", notes=lambda self: ["x"]), feature("b"), feature("c", notes=lambda self: ["y"])])
    assert manager.call("notes") == [("a", ["x"]), ("c", ["y"])]
    assert manager.owners("notes") == {"a", "c"}
    assert manager.owners("activated") == set()


def test_a_chained_hook_passes_the_value_on_in_plan_order():
    manager = FeatureManager(
        [
            feature("a", layer_spec=lambda self, spec, config: [*spec, "a"]),
            feature("quiet", layer_spec=lambda self, spec: None),
            feature("b", layer_spec=lambda self, spec: [*spec, "b"]),
        ]
    )
    assert manager.chain("layer_spec", spec=["start"], config=None) == ["start", "a", "b"]


def test_context_managers_of_a_hook_nest_in_plan_order():
    order = []

    @contextmanager
    def around(self, state):
        order.append(f"{self.spec.name} enters step {state}")
        yield
        order.append(f"{self.spec.name} leaves")

    manager = FeatureManager(
        [
            feature("a", around_train_step=around),
            feature("quiet", around_train_step=lambda self: None),
            feature("b", around_train_step=around),
        ]
    )
    with manager.around("around_train_step", state=3):
        order.append("step")
    assert order == ["a enters step 3", "b enters step 3", "step", "b leaves", "a leaves"]
    assert manager.effects["quiet", "around_train_step"] == 0


def test_a_context_manager_that_comes_first_is_the_outermost_one():
    order = []

    def around():
        @contextmanager
        def enter(self, state):
            order.append(self.spec.name)
            yield

        return enter

    spec = FeatureSpec("z", Category.TOOL)
    first = type("z", (Feature,), {"spec": spec, "around_train_step": hookimpl(tryfirst=True)(around())})(ARGS, WORLD)
    with FeatureManager([feature("a", around_train_step=around()), first]).around("around_train_step", state=1):
        assert order == ["z", "a"]


def failing(self):
    raise RuntimeError("no idea")


def calling(self):
    return failing(self)


@pytest.mark.guards(31)
def test_an_error_in_a_hook_names_the_feature_the_hook_and_both_lines():
    with pytest.raises(MindSpeedError) as caught:
        FeatureManager([feature("a", patches=calling)]).call("patches")
    hook, inner = (f"{__file__}:{function.__code__.co_firstlineno + 1}" for function in (calling, failing))
    assert str(caught.value) == (
        "MS901 RuntimeError: no idea, raised by the hook 'patches' of feature a\n"
        f"  where: {hook}, raised at {inner}\n"
        "  fix: remove the feature, or report the error to its authors with the traceback that MINDSPEED_TRACE=1 prints"
    )


def test_the_trace_has_the_traceback_of_an_error_in_a_hook(monkeypatch, capsys):
    monkeypatch.setenv("MINDSPEED_TRACE", "1")
    with pytest.raises(MindSpeedError):
        FeatureManager([feature("a", patches=failing)]).call("patches")
    assert 'raise RuntimeError("no idea")' in capsys.readouterr().err


@pytest.mark.guards(31)
def test_a_hook_that_does_not_exist_is_named_with_its_line_and_near_names():
    method = lambda self: []  # noqa: E731
    line = f"{__file__}:{method.__code__.co_firstlineno}"
    with pytest.raises(MindSpeedError) as caught:
        FeatureManager([feature("a", pathces=method), feature("b", zzz=method)])
    assert str(caught.value) == (
        "MS104 the method 'pathces' of the feature 'a' is marked @hookimpl, but no hook has this name\n"
        f"  where: {line}\n"
        "  fix: did you mean patches or notes?\n"
        "MS104 the method 'zzz' of the feature 'b' is marked @hookimpl, but no hook has this name\n"
        f"  where: {line}\n"
        "  fix: rename the method to a hook of mindspeed docs hooks, or remove @hookimpl"
    )


def test_a_hook_with_a_foreign_parameter_is_named_with_those_that_it_may_have():
    method = lambda self, konfig: None  # noqa: E731
    with pytest.raises(MindSpeedError) as caught:
        FeatureManager([feature("a", config_ready=method, activated=method)])
    line = f"{__file__}:{method.__code__.co_firstlineno}"
    assert str(caught.value) == (
        "MS104 the hook 'activated' of the feature 'a' has the unknown parameter konfig\n"
        f"  where: {line}\n"
        "  fix: remove the parameter\n"
        "MS104 the hook 'config_ready' of the feature 'a' has the unknown parameter konfig\n"
        f"  where: {line}\n"
        "  fix: use any of config"
    )


def test_every_hook_states_what_none_means_where_features_may_answer():
    asked = {name for name, facts in HOOKS.items() if facts.answers in ("one", "merged", "chained")}
    assert [name for name in sorted(asked) if not HOOKS[name].none] == []
    assert {facts.caller for facts in HOOKS.values()} == set(CALLERS)
    assert {facts.answers for facts in HOOKS.values()} == {*ANSWERS, "none"}


def test_a_configuration_is_compared_without_its_repr_and_with_fields_that_are_missing():
    @dataclass
    class Unfinished:
        parts: list[int] = field(default_factory=list)
        later: int = field(init=False)

        def __repr__(self):
            raise AssertionError("a configuration was printed")

    manager = FeatureManager([feature("a", config_ready=lambda self, config: config.parts.append(1))])
    manager.call("config_ready", config=Unfinished())
    assert manager.effects["a", "config_ready"] == 1


def test_a_feature_keeps_state_between_hooks_on_its_instance():
    def groups_created(self, sizes):
        self.groups = sizes

    manager = FeatureManager(
        [feature("a", groups_created=groups_created, layer_spec=lambda self, spec: [*spec, self.groups["tp"]])]
    )
    manager.call("groups_created", sizes={"tp": 2}, get_group=None)
    assert manager.chain("layer_spec", spec=[], config=None) == [2]


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
        ("layer_spec", lambda self, spec: spec[0].update(b=1), {"spec": [{"a": 1}], "config": None}, True),
        ("layer_spec", lambda self, spec: copy.deepcopy(spec), {"spec": [Config()], "config": None}, False),
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
