import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import __version__
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig

from mindspeed import registry
from mindspeed.engine.inspection.config_arguments import PLACES
from mindspeed.engine.inspection.sites import find_site
from mindspeed.engine.resolution.environment import made_up, version_in
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.runtime import session
from mindspeed.megatron import hook_wrappers
from mindspeed.megatron.hook_points import (
    CORE_HOOK_POINTS,
    PLATFORM_HOOK_POINTS,
    TRAINING_HOOK_POINTS,
    MegatronHookPoints,
    hook_points_for,
)
from mindspeed.platforms import PLATFORMS
from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, MindSpeedError, Patch, Replace, hookimpl
from mindspeed.plugins.discovery import Catalog, DiscoveredFeature
from mindspeed.plugins.hookspecs import HOOKS
from mindspeed.registry import base_features

FUNCTIONS = (
    "destroy_model_parallel",
    "get_nccl_options",
    "get_block_submodules",
    "get_megatron_optimizer",
    "save",
    "initialize_model_parallel",
    "model_init",
    "backward_step",
)


def lines(*needs: Any, **known: Any) -> list[tuple[str, str]]:
    """Function and reason of every wrap that a plan needs, beside those that all plans have."""
    needed = [patch for patch in hook_points_for(*needs, **known) if patch not in PLATFORM_HOOK_POINTS]
    return [(patch.target.partition(":")[2], patch.reason) for patch in needed]


def test_only_what_a_plan_needs_is_wrapped():
    assert lines([], []) == []
    assert lines(["model_built", "patches"], []) == [("get_megatron_optimizer", "calls the hook model_built")]
    assert lines(["layer_spec"], []) == [
        ("_get_block_submodules", "calls the hook layer_spec"),
        ("_get_mtp_block_submodules", "calls the hook layer_spec"),
    ]
    assert lines([], ["overlap_param_gather"]) == [
        ("DistributedDataParallelConfig.__post_init__", "passes the plan's arguments to DistributedDataParallelConfig"),
        ("OptimizerConfig.__post_init__", "passes the plan's arguments to OptimizerConfig"),
    ]
    assert lines([], [], phases=True) == [
        ("initialize_model_parallel", "marks the end of setup"),
        ("destroy_model_parallel", "marks the start of teardown"),
        ("get_forward_backward_func", "marks the start of a step or an evaluation"),
        ("save", "marks the writing of a checkpoint"),
    ]


def test_an_upstream_function_has_one_wrap_whatever_a_plan_needs_of_it():
    needed = hook_points_for(HOOKS, ["tensor_model_parallel_size", "overlap_param_gather"], training=True, phases=True)
    targets = [patch.target for patch in needed]
    assert len(set(targets)) == len(targets)
    reasons = {patch.target.partition(":")[2]: patch.reason for patch in needed}
    assert reasons["initialize_model_parallel"] == (
        "passes the plan's arguments to initialize_model_parallel; marks the end of setup; calls the hook groups_created"
    )
    assert (
        reasons["get_forward_backward_func"]
        == "marks the start of a step or an evaluation; calls the hooks schedule, around_schedule, around_data_load"
    )


def test_every_place_is_wrapped_when_nothing_is_known_of_megatron(monkeypatch):
    monkeypatch.setattr("mindspeed.megatron.hook_points.arguments_of", lambda version: None)
    always = {patch.target for patch in PLATFORM_HOOK_POINTS}
    in_some = {point.target for point in CORE_HOOK_POINTS if point.megatron}
    everywhere = {place.target for place in PLACES} - in_some
    assert {patch.target for patch in hook_points_for([], ["anything"])} - always == everywhere
    assert hook_points_for([], []) == [*PLATFORM_HOOK_POINTS]


def test_every_hook_that_megatron_calls_has_a_hook_point():
    core = {hook for point in CORE_HOOK_POINTS for hook in point.hooks}
    loop = {hook for point in TRAINING_HOOK_POINTS for hook in point.hooks}
    assert core == {name for name, facts in HOOKS.items() if facts.caller == "megatron-core"}
    assert loop == {name for name, facts in HOOKS.items() if facts.caller == "training loop"}
    assert {point.arguments for point in CORE_HOOK_POINTS} - {""} == {place.name for place in PLACES}


def test_every_hook_point_exists_in_megatron_and_its_wrapper_here():
    here = [point for point in CORE_HOOK_POINTS if not point.megatron or version_in(__version__, point.megatron)]
    assert [point.target for point in here if find_site(point.target) is None] == []
    for point in (*CORE_HOOK_POINTS, *TRAINING_HOOK_POINTS):
        module, _, name = point.wrap(["a test"]).value.partition(":")
        assert callable(getattr(import_module(module), name))


def test_the_base_plan_of_every_platform_has_the_hook_points():
    assert all(MegatronHookPoints in base_features(platform) for platform in PLATFORMS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrapper_that_outlives_its_plan_does_what_the_original_does(name):
    calls = []

    def original(*args: Any) -> str:
        calls.append(args)
        return "result"

    assert getattr(hook_wrappers, name)(original)("first", "second") == "result"
    assert calls == [("first", "second")]


def test_a_configuration_is_shown_after_megatron_accepted_it(activate):
    order = []

    @dataclass
    class Config:
        def __post_init__(self) -> None:
            order.append("megatron")

    Config.__post_init__ = hook_wrappers.transformer_config_post_init(Config.__post_init__)
    activate(first={"config_ready": lambda self, config: order.append(type(config).__name__)})
    Config()
    assert order == ["megatron", "Config"]


def test_a_heterogeneous_configuration_is_shown_once_when_it_is_complete(monkeypatch):
    seen = []

    class Looking(Feature[FeatureArgs]):
        spec = FeatureSpec("looking", Category.TOOL)

        @hookimpl
        def config_ready(self, config: Any) -> None:
            seen.append(len(config.per_block_parameters))

    with active_plan(Looking, monkeypatch):
        block = {"attention": {"n_heads_in_group": 1}, "ffn": {"ffn_mult": 2.0}}
        HeterogeneousTransformerConfig(
            num_layers=2,
            hidden_size=8,
            num_attention_heads=2,
            gated_linear_unit=True,
            normalization="RMSNorm",
            heterogeneous_layers_config_encoded_json=json.dumps({"block_configs": [block, block]}),
        )
    assert seen == [2]


@pytest.mark.guards(31)
def test_groups_are_announced_after_they_exist_and_before_they_go(activate, monkeypatch):
    order = []
    monkeypatch.setattr(hook_wrappers, "group_sizes", lambda: {"tp": 2})
    monkeypatch.setattr(hook_wrappers, "get_group", lambda name: f"group {name}")
    monkeypatch.setattr(session, "enter", lambda phase: order.append(f"{phase} begins"))
    activate(
        first={
            "groups_created": lambda self, sizes, get_group: order.append(("created", sizes, get_group("tp"))),
            "groups_destroyed": lambda self: order.append("destroyed"),
        }
    )
    hook_wrappers.initialize_model_parallel(lambda size: order.append(size))(2)
    hook_wrappers.destroy_model_parallel(lambda: order.append("megatron destroys"))()
    assert order == [
        2,
        ("created", {"tp": 2}, "group tp"),
        "build begins",
        "teardown begins",
        "destroyed",
        "megatron destroys",
    ]


def test_options_of_a_group_come_from_the_feature_that_has_some(activate):
    get_options = hook_wrappers.get_nccl_options(lambda name, configs: f"megatron's for {name}")
    activate(
        quiet={"group_options": lambda self, group: None},
        loud={"group_options": lambda self, group: {"max_ctas": 8} if group == "tp" else None},
    )
    assert [get_options(name, {}) for name in ("tp", "dp")] == [{"max_ctas": 8}, "megatron's for dp"]


def test_gradients_are_given_where_the_optimizer_reads_them_after_megatron_has_summed_them(activate):
    weight, norm, frozen, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(4))
    weight.main_grad, weight.grad = torch.ones(2), None  # a kernel has added to the buffer outside of autograd
    norm.grad = torch.ones(2)
    frozen.requires_grad_(False)
    model = torch.nn.ParameterDict({"weight": weight, "norm": norm, "frozen": frozen, "unused": unused})
    order: list[Any] = []

    def double(self, gradients):
        order.append([name for name, _ in gradients])
        for _, gradient in gradients:
            gradient.mul_(2)

    activate(doubling={"gradients_ready": double})
    finalize = hook_wrappers.finalize_model_grads(lambda model, tokens: order.append(f"summed over {tokens}"))
    finalize([model], 3)
    assert order == ["summed over 3", ["norm", "weight"]]
    assert (weight.main_grad.tolist(), weight.grad, norm.grad.tolist()) == ([2, 2], None, [2, 2])


class _Communicator:
    """Stands for the nested part of a backend's options."""

    def __init__(self) -> None:
        self.max_ctas = 32
        self.min_ctas = 1


class _Options:
    """Stands for the options of a backend."""

    def __init__(self, high: bool = False, **config: int) -> None:
        self.is_high_priority_stream = high
        self.config = _Communicator()
        vars(self.config).update(config)


def test_options_of_two_features_are_merged_field_by_field(activate):
    get_options = hook_wrappers.get_nccl_options(lambda name, configs: None)
    activate(
        first={"group_options": lambda self, group: _Options(high=True, max_ctas=8)},
        second={"group_options": lambda self, group: _Options(max_ctas=8, min_ctas=4)},
    )
    options = get_options("tp", {})
    assert (options.is_high_priority_stream, vars(options.config)) == (True, {"max_ctas": 8, "min_ctas": 4})


def test_options_that_disagree_are_named_with_both_features(activate):
    get_options = hook_wrappers.get_nccl_options(lambda name, configs: None)
    activate(
        first={"group_options": lambda self, group: _Options(max_ctas=8, min_ctas=2)},
        second={"group_options": lambda self, group: _Options(max_ctas=16, min_ctas=2)},
        third={"group_options": lambda self, group: {"max_ctas": 8}},
    )
    with pytest.raises(MindSpeedError) as error:
        get_options("tp", {})
    assert str(error.value) == (
        "MS402 the options config.max_ctas of process group tp have two values: first sets 8, second sets 16\n"
        "  fix: remove first or second\n"
        "MS402 the options of process group tp have two values: first gives _Options, third gives dict\n"
        "  fix: remove first or third"
    )


def test_layer_specs_are_chained_in_plan_order(activate):
    activate(
        first={"layer_spec": lambda self, spec, config: [*spec, f"first {config}"]},
        second={"layer_spec": lambda self, spec, config: [*spec, "second"]},
    )
    get_submodules = hook_wrappers.get_block_submodules(lambda config, spec, vp_stage=None: [spec])
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

    wrapped = hook_wrappers.get_megatron_optimizer(get_megatron_optimizer)
    assert wrapped("config", model_chunks=["chunk"], use_gloo_process_groups=True) == "adam"
    assert order == [("model", ["chunk"]), "megatron", ("optimizer", "adam")]


def test_a_schedule_is_chosen_when_the_model_is_known(activate, monkeypatch):
    monkeypatch.setattr(hook_wrappers, "config_of", lambda model: model.config)
    monkeypatch.setattr(session, "enter", lambda phase: None)
    forward_backward = hook_wrappers.get_forward_backward_func(lambda: lambda **arguments: "megatron's")()
    models = [SimpleNamespace(config="deep"), SimpleNamespace(config="flat")]
    assert [forward_backward(model=model) for model in models] == ["megatron's", "megatron's"]
    activate(first={"schedule": lambda self, config: (lambda **arguments: "ours") if config == "deep" else None})
    assert [forward_backward(model=model) for model in models] == ["ours", "megatron's"]


def test_a_schedule_has_one_wrapper_as_long_as_megatron_returns_the_same():
    schedules = {"deep": lambda **arguments: "deep", "flat": lambda **arguments: "flat"}
    get_function = hook_wrappers.get_forward_backward_func(lambda kind: schedules[kind])
    assert get_function("deep") is get_function("deep")
    assert get_function("flat") is not get_function("deep")
    assert get_function("deep").__wrapped__ is schedules["deep"]


def test_features_stand_around_a_pass_of_the_schedule(activate, monkeypatch):
    order = []
    monkeypatch.setattr(session, "enter", order.append)

    @contextmanager
    def around(self, chunks, forward_only, micro_batches):
        order.append((chunks, forward_only, micro_batches))
        yield
        order.append("after")

    activate(first={"around_schedule": around})
    forward_backward = hook_wrappers.get_forward_backward_func(lambda: lambda **arguments: order.append("pass"))()
    forward_backward(model="chunk", num_microbatches=4)
    forward_backward(model=["chunk"], forward_only=True, num_microbatches=2)
    assert order == ["step", (["chunk"], False, 4), "pass", "after", "evaluate", (["chunk"], True, 2), "pass", "after"]


def test_micro_batches_are_loaded_inside_what_features_put_around_loading(activate, monkeypatch):
    monkeypatch.setattr(session, "enter", lambda phase: None)
    order = []

    @contextmanager
    def around(self):
        order.append("before")
        yield
        order.append("after")

    activate(first={"around_data_load": around})
    schedule = hook_wrappers.get_forward_backward_func(lambda: lambda **arguments: arguments["data_iterator"])()
    assert next(schedule(model="chunk", num_microbatches=1, data_iterator=iter([7]))) == 7
    first, second = schedule(model=["chunk"] * 2, num_microbatches=1, data_iterator=[iter("a"), None])
    assert (list(first), second) == (["a"], None)
    assert order == ["before", "after", "before", "after", "before"]
    assert schedule(model="chunk", num_microbatches=1, data_iterator=None) is None


def test_features_stand_around_both_passes_of_a_unit(activate):
    order = []

    def around(name):
        @contextmanager
        def enter(self, unit):
            order.append((name, unit.microbatch, unit.chunk))
            yield
            order.append(f"{name} ends")

        return enter

    activate(first={"around_forward_step": around("forward"), "around_backward_step": around("backward")})

    def forward_step(function: Any, data: Any, current_microbatch: Any = None, vp_stage: Any = None) -> Any:
        output = SimpleNamespace()
        return [output] if vp_stage else output, 7

    forward = hook_wrappers.forward_step(forward_step)
    backward = hook_wrappers.backward_step(lambda gradient, output: "gradient")
    (first, tokens), (second, _) = forward("f", "d", current_microbatch=3), forward("f", "d", 4, vp_stage=1)
    assert (tokens, backward(None, second), backward(None, first)) == (7, "gradient", "gradient")
    assert [line for line in order if isinstance(line, tuple)] == [
        ("forward", 3, 0),
        ("forward", 4, 1),
        ("backward", 4, 1),
        ("backward", 3, 0),
    ]
    assert order[:2] == [("forward", 3, 0), "forward ends"]


def test_two_features_that_give_a_schedule_are_named(activate, monkeypatch):
    monkeypatch.setattr(hook_wrappers, "config_of", lambda model: model)
    monkeypatch.setattr(session, "enter", lambda phase: None)
    both = {"schedule": lambda self, config: print}
    activate(first=both, second=both)
    with pytest.raises(MindSpeedError) as error:
        hook_wrappers.get_forward_backward_func(lambda: print)()(model="config")
    assert str(error.value) == "MS402 first and second both give a pipeline schedule\n  fix: remove one of these features"


class _Replacing(Feature[FeatureArgs]):
    """Puts a function of its own in place of one that has a hook point, and implements the hook."""

    spec = FeatureSpec("replacing", Category.TOOL)

    @hookimpl
    def patches(self) -> list[Patch]:
        return [Replace("megatron.core.parallel_state:initialize_model_parallel", f"{__name__}:own_groups", "a test")]

    @hookimpl
    def groups_created(self, sizes: dict[str, int], get_group: Any) -> None:
        _called.append("hook")


_called: list[str] = []


def own_groups(*args: Any, **kwargs: Any) -> None:
    _called.append("replacement")


@contextmanager
def active_plan(feature: type[Feature[Any]], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Activate a plan of one feature for the length of a with-block."""
    name = feature.spec.name
    known = Catalog([DiscoveredFeature(name, "acme", "1", f"acme:{feature.__name__}", feature)])
    plan = registry.resolve([Layer("test", features=(name,))], made_up("cpu", "0.16.1"), known)
    monkeypatch.setattr(registry, "catalog_for", lambda names: known)
    registry.activate(plan)
    try:
        yield
    finally:
        registry.deactivate()


def test_a_wrap_stays_around_what_a_feature_puts_in_place_of_the_original(monkeypatch):
    monkeypatch.setattr(hook_wrappers, "group_sizes", dict)
    _called.clear()
    with active_plan(_Replacing, monkeypatch):
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel()
    assert _called == ["replacement", "hook"]


def test_a_feature_is_told_when_its_plan_begins_and_ends(monkeypatch):
    order = []

    class Alive(Feature[FeatureArgs]):
        spec = FeatureSpec("alive", Category.TOOL)

        @hookimpl
        def activated(self) -> None:
            order.append(("activated", session.current() is not None))

        @hookimpl
        def deactivated(self) -> None:
            order.append(("deactivated", session.current() is not None))

    with active_plan(Alive, monkeypatch):
        pass
    assert order == [("activated", True), ("deactivated", False)]


def test_a_feature_that_fails_when_its_plan_begins_ends_the_plan(monkeypatch):
    class Failing(Feature[FeatureArgs]):
        spec = FeatureSpec("failing", Category.TOOL)

        @hookimpl
        def activated(self) -> None:
            raise RuntimeError("no licence")

    text = "MS901 RuntimeError: no licence, raised by the hook 'activated' of feature failing"
    with pytest.raises(MindSpeedError, match=text), active_plan(Failing, monkeypatch):
        pass
    assert session.current() is None
