"""Proof of application: what each feature reached, what it did not, and that counting leaves nothing behind."""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from mindspeed.engine.patching.apply import AppliedPatches
from mindspeed.engine.planning.plan import ActivationPlan, PlannedOverride
from mindspeed.engine.resolution.planned_feature import PlannedFeature
from mindspeed.engine.runtime import effects as proof_module
from mindspeed.engine.runtime import session
from mindspeed.engine.runtime.effects import EffectTracker
from mindspeed.job.world import World
from mindspeed.ops.variants import public_functions
from mindspeed.plugins import Category, Feature, FeatureArgs, FeatureSpec, hookimpl
from mindspeed.plugins.manager import FeatureManager
from mindspeed.plugins.patches import ArgOverride, Mixin, Patch, Replace, Set, Wrap
from mindspeed.problems import MindSpeedError
from tests.engine.patching.patch_cases import ATTENTION, STATE, planned
from tests.engine.patching.patch_fixtures import fake_megatron  # noqa: F401

pytestmark = pytest.mark.usefixtures("small_heap")

Start = Callable[..., EffectTracker]
Said = list[str]


@pytest.fixture
def said() -> Said:
    return []


@pytest.fixture
def start(fake_megatron: object, said: Said) -> Iterator[Start]:  # noqa: F811
    """Activate one feature ``alpha`` with these patches and hooks on the fake megatron."""

    def make(
        *patches: Patch,
        strict: bool = False,
        argument: str = "",
        ops: tuple[str, ...] = (),
        own_trainer: str = "",
        outside: tuple[Patch, ...] = (),
        **hooks: Any,
    ) -> EffectTracker:
        spec = FeatureSpec("alpha", Category.TOOL, ops=ops, own_trainer=own_trainer)
        members = {"spec": spec, **{name: hookimpl(function) for name, function in hooks.items()}}
        feature = type("Alpha", (Feature,), members)(FeatureArgs(), World({}))
        plan = ActivationPlan(
            features=(PlannedFeature("alpha", "acme", "1", (), {}),),
            world=World({}),
            patches=(*(planned("alpha", patch) for patch in patches), *(planned("beta", patch) for patch in outside)),
            overrides=(PlannedOverride(("alpha",), ArgOverride(argument, 1, "a test")),) if argument else (),
            strict=strict,
        )
        surroundings = session.Surroundings(dict, lambda plan, path: None, public_functions)
        session.start(plan, FeatureManager([feature]), surroundings)
        active = session.current()
        assert active is not None
        active.proof.say = said.append
        return active.proof

    yield make
    session.stop()


def one_step(proof: EffectTracker, action: Callable[[], object] = lambda: None) -> None:
    """A run of set-up, build and one step, in which ``action`` happens."""
    proof.enter("build")
    proof.enter("step")
    action()
    proof.enter("step")


def attention() -> Any:
    return importlib.import_module(ATTENTION)


def state() -> Any:
    return importlib.import_module(STATE)


SCALE = Replace(f"{STATE}:scale", "glue:triple", "a test")
FORWARD = Wrap(f"{ATTENTION}:Attention.forward", "glue:marked", "a test")


def test_sites_that_were_called_are_reached(start: Start, said: Said) -> None:
    state(), attention()
    proof = start(SCALE, FORWARD, Mixin(f"{ATTENTION}:SelfAttention", "glue:Loud", "a test"))

    def action() -> None:
        state().scale(1)
        attention().SelfAttention().forward(2)

    one_step(proof, action)
    report = proof.report()
    assert [str(feature) for feature in report.features] == ["alpha: 3 sites, 3 effective, 3 reached (3 calls)"]
    assert said == [f"mindspeed: 1 feature active, 3 sites, 3 effective, 3 reached, 0 stale references; plan {report.digest}"]
    assert report.problems == ()


@pytest.mark.guards(16)
def test_a_site_that_was_never_reached_is_a_warning_with_the_fix(start: Start, said: Said) -> None:
    state()
    one_step(start(SCALE))
    assert said[1:] == [
        (
            "MS410 alpha has no effect: the patched megatron.core.state:scale was never used in the phase step (phases: "
            "setup, build = build of the model, step = training step, evaluate, checkpoint, teardown)\n"
            "  fix: remove alpha, or check whether the model has the part that it changes"
        )
    ]


def test_the_fix_names_the_line_for_a_trainer_without_megatron(start: Start, said: Said) -> None:
    state()
    one_step(start(SCALE, own_trainer="from acme import Alpha"))
    assert said[1].endswith(
        "  fix: remove alpha, or check whether the model has the part that it changes. In a trainer without Megatron, use it "
        "by: from acme import Alpha"
    )


def test_a_feature_that_hides_another_is_named(start: Start, said: Said) -> None:
    hiding = Wrap(f"{STATE}:scale", "glue:alone", "a test")
    one_step(start(SCALE, outside=(hiding,)), lambda: state().scale(1))
    (problem,) = [line for line in said if line.startswith("MS410 alpha has no effect")]
    assert "because: beta wraps megatron.core.state:scale outside of alpha and does not call it" in problem
    assert "fix: remove alpha or beta, or check" in problem


@pytest.mark.budget(8)
def test_an_optional_site_need_not_be_reached_while_another_is(start: Start, said: Said) -> None:
    state(), attention()
    path = Wrap(f"{ATTENTION}:Attention.forward", "glue:marked", "a test", optional=True)
    proof = start(SCALE, path)
    one_step(proof, lambda: state().scale(1))
    assert [point.state for point in proof.report().features[0].points] == ["reached", "other path"]
    assert len(said) == 1


def test_optional_sites_of_which_none_is_reached_are_named(start: Start, said: Said) -> None:
    state()
    one_step(start(Replace(f"{STATE}:scale", "glue:triple", "a test", optional=True)))
    assert said[1].startswith("MS410 alpha has no effect: the patched megatron.core.state:scale")


@pytest.mark.guards(16)
def test_under_strict_it_is_an_error(start: Start) -> None:
    state()
    proof = start(SCALE, strict=True)
    with pytest.raises(MindSpeedError) as caught:
        one_step(proof)
    assert [problem.code for problem in caught.value.problems] == ["MS410"]


def test_after_its_phase_every_function_has_its_own_code_back(start: Start) -> None:
    classes, functions = attention(), state()
    proof = start(SCALE, FORWARD)
    counted = [functions.scale, vars(classes.Attention)["forward"]]
    during = [function.__code__ for function in counted]
    one_step(proof, lambda: functions.scale(1))
    after = [function.__code__ for function in counted]
    assert all(isinstance(function, FunctionType) for function in counted)
    assert all(new is not old for new, old in zip(after, during, strict=True))
    assert after[0] is importlib.import_module("glue").triple.__code__
    functions.scale(1)
    assert proof.effects() == {"alpha": {f"{STATE}:scale": 1, f"{ATTENTION}:Attention.forward": 0}}


@pytest.mark.budget(8)
def test_a_point_of_a_later_phase_is_not_yet_due(start: Start, said: Said) -> None:
    state()
    proof = start(Replace(f"{STATE}:scale", "glue:triple", "a test", phase="checkpoint"))
    one_step(proof)
    assert [str(feature) for feature in proof.report().features] == [
        "alpha: 1 site, 1 effective, 0 reached (0 calls), 1 not yet due"
    ]
    assert len(said) == 1
    proof.enter("checkpoint")
    state().scale(1)
    proof.enter(None)
    assert str(proof.report().features[0]) == "alpha: 1 site, 1 effective, 1 reached (1 call)"


def test_a_module_imported_later_is_counted_too(start: Start) -> None:
    proof = start(SCALE)
    one_step(proof, lambda: state().scale(1))
    assert str(proof.report().features[0]) == "alpha: 1 site, 1 effective, 1 reached (1 call)"


def test_a_name_that_somebody_bound_again_is_not_effective(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    state()
    proof = start(SCALE)
    monkeypatch.setattr(state(), "scale", len)
    (problem,) = proof.report().problems
    assert str(problem) == (
        "MS411 other code replaced megatron.core.state:scale after alpha patched it\n"
        "  fix: call mindspeed.activate after this other code has run, or remove alpha"
    )


def test_a_plain_value_is_effective_and_not_counted(start: Start) -> None:
    state()
    proof = start(Set(f"{STATE}:LIMIT", 5, "a test"))
    one_step(proof)
    (point,) = proof.report().features[0].points
    assert (point.effective, point.calls, point.state) == (True, None, "not counted")
    assert proof.report().problems == ()


def test_hooks_and_arguments_and_operators_are_points(start: Start) -> None:
    import torch

    from mindspeed.ops.swiglu import swiglu

    code = swiglu.__code__
    proof = start(argument="hidden_size", ops=("swiglu",), optimizer_built=lambda self, optimizer: None)

    def action() -> None:
        session.call("optimizer_built", optimizer=None)
        session.current().proof.taken["hidden_size"] = {"TransformerConfig": 8}  # type: ignore[union-attr]
        swiglu(torch.zeros(2, 4))

    one_step(proof, action)
    points = {(point.kind, point.name): point.state for point in proof.report().features[0].points}
    assert points == {
        ("hook", "optimizer_built"): "reached",
        ("argument", "hidden_size"): "reached",
        ("op", "swiglu"): "reached",
    }
    assert swiglu.__code__ is code


@pytest.mark.guards(17, 18)
def test_what_nothing_took_or_called_is_named(start: Start, said: Said) -> None:
    one_step(start(argument="hidden_size", optimizer_built=lambda self, optimizer: None))
    assert [line.partition("\n")[0] for line in said[1:]] == [
        f"MS410 alpha has no effect: {name} was never used in the phase build (phases: setup, build = build of the model, "
        "step = training step, evaluate, checkpoint, teardown)"
        for name in ("the hook optimizer_built", "Megatron's argument hidden_size")
    ]


@pytest.mark.guards(13)
def test_a_stale_reference_is_counted_and_named(start: Start, said: Said) -> None:
    original = state().scale
    holder = lambda value: original(value)  # noqa: E731
    proof = start(SCALE)
    one_step(proof, lambda: state().scale(1))
    assert holder(1) == 2
    assert "1 stale reference;" in said[0]
    assert said[1].startswith("MS404 the closure of tests.engine.runtime.test_effects.test_a_stale_reference")


def test_the_heap_is_walked_once_after_the_first_step(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    state()
    proof = start(SCALE)
    assert proof.applied is not None
    walks = list[str]()
    audit = proof.applied.audit
    monkeypatch.setattr(AppliedPatches, "audit", lambda self: walks.append("walk") or audit())
    proof.report()
    one_step(proof, lambda: state().scale(1))
    proof.report()
    assert walks == ["walk", "walk"]


def test_the_report_lies_beside_the_run(start: Start, tmp_path: Path) -> None:
    state()
    proof = start(SCALE)
    proof.path = tmp_path / "report.json"
    one_step(proof, lambda: state().scale(1))
    written = json.loads(proof.path.read_text())
    assert written["ended"] == ["setup", "build", "step"]
    assert written["features"][0]["summary"] == "alpha: 1 site, 1 effective, 1 reached (1 call)"
    assert written["features"][0]["stability"] == "prototype"


def test_a_report_that_cannot_be_written_ends_nothing(start: Start, said: Said, tmp_path: Path) -> None:
    state()
    proof = start(SCALE)
    proof.path = tmp_path
    one_step(proof, lambda: state().scale(1))
    assert said[0] == f"mindspeed: the report cannot be written: [Errno 21] Is a directory: '{tmp_path}'"


def test_a_run_of_one_step_is_judged_at_its_end(start: Start, said: Said) -> None:
    state()
    proof = start(SCALE, strict=True)
    proof.enter("step")
    session.stop()
    assert [line.partition(" ")[0] for line in said] == ["mindspeed:", "MS410"]


@pytest.mark.budget(8)
def test_what_only_another_rank_reaches_is_no_warning(start: Start, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    state(), attention()
    proof = start(SCALE, FORWARD)
    store = Store()
    store.set(f"mindspeed/proof/{proof.plan.digest}/1", "01")
    monkeypatch.setattr(proof_module, "_default_group", lambda: (0, 2, store))
    one_step(proof, lambda: state().scale(1))
    assert [point.state for point in proof.report().features[0].points] == ["reached", "reached on rank 1"]
    assert len(said) == 1


def test_another_rank_says_what_it_reached_and_nothing_else(start: Start, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    state(), attention()
    proof = start(SCALE, FORWARD)
    store = Store()
    monkeypatch.setattr(proof_module, "_default_group", lambda: (1, 2, store))
    one_step(proof, lambda: attention().Attention().forward(1))
    assert store.values == {f"mindspeed/proof/{proof.plan.digest}/1": b"01"}
    assert said == []


def test_a_rank_that_does_not_say_is_not_known(start: Start, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    state()
    proof = start(SCALE)
    monkeypatch.setattr(proof_module, "_default_group", lambda: (0, 3, Store()))
    one_step(proof)
    assert [point.state for point in proof.report().features[0].points] == ["unknown, because rank 1 did not report"]
    assert len(said) == 1


class Store:
    """A key-value store as torch has it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def wait(self, keys: list[str], timeout: object) -> None:
        if not all(key in self.values for key in keys):
            raise RuntimeError("timeout")


def test_two_patches_of_one_site_are_one_site(start: Start) -> None:
    state()
    proof = start(SCALE, Wrap(f"{STATE}:scale", "glue:marked", "a test"))
    one_step(proof, lambda: state().scale(1))
    assert str(proof.report().features[0]).startswith("alpha: 1 site, 1 effective, 1 reached")


def test_what_dataclasses_share_is_no_function_of_an_algorithm() -> None:
    """Pickling any frozen dataclass with slots calls the same function."""
    module = PlannedFeature.__module__
    found = proof_module.functions_of_modules(f"{module}, not.loaded")
    assert PlannedFeature.to_json in found
    assert {function.__module__ for function in found} == {module}
