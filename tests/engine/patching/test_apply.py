"""Applying patches to loaded modules: every kind of patch, target and holder, and the way back."""

import importlib
import inspect
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest

from mindspeed.engine.planning.plan import PlannedPatch
from mindspeed.plugins.patches import Ref, Replace, Set, Wrap
from mindspeed.problems import PatchError
from tests.engine.patching.patch_cases import ATTENTION, STATE, applied, mixin, planned, put, replace, wrap
from tests.engine.patching.patch_fixtures import fake_megatron  # noqa: F401
from tests.engine.patching.patch_snapshots import Snapshot

PACKAGES = ("megatron", "fakelib", "glue", "layers")


@pytest.fixture
def attention(fake_megatron: object) -> Any:  # noqa: F811
    """The attention module, with everything that holds its names imported."""
    for name in ("megatron.core.transformer.layer", "megatron.core.lazy", "glue"):
        importlib.import_module(name)
    return sys.modules[ATTENTION]


@pytest.fixture
def state(attention: Any) -> Any:
    return sys.modules[STATE]


@pytest.fixture
def layer(attention: Any) -> Any:
    return sys.modules["megatron.core.transformer.layer"]


ALIASES: dict[str, Callable[[Any, Any], object]] = {
    "another name in another module": lambda attention, layer: attention.times,
    "a star import": lambda attention, layer: layer.scale,
    "a list": lambda attention, layer: attention.LIST[0],
    "a nested tuple": lambda attention, layer: attention.TUPLE[2][0],
    "a set": lambda attention, layer: next(f for f in attention.SET if f.__name__ == "scale"),
    "a frozen set": lambda attention, layer: next(iter(attention.FROZEN)),
    "a keyword default": lambda attention, layer: attention.attend.__kwdefaults__["scaled"],
    "a nested specification": lambda attention, layer: attention.SPEC.submodules.scale.module,
}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.guards(13)
def test_every_holder_of_a_function_follows(alias: str, attention: Any, layer: Any, state: Any) -> None:
    original = state.scale
    patches = applied(replace(f"{STATE}:scale", "glue:triple"))
    assert ALIASES[alias](attention, layer) is state.scale is not original
    assert state.scale(2) == 7
    patches.undo()
    assert ALIASES[alias](attention, layer) is state.scale is original


CLASS_ALIASES: dict[str, Callable[[Any, Any], object]] = {
    "another name in another module": lambda attention, layer: layer.CoreAttention,
    "a class attribute": lambda attention, layer: layer.Layer.core,
    "a dictionary in a class": lambda attention, layer: layer.Layer.by_name["core"],
    "a dictionary": lambda attention, layer: attention.BY_NAME["attention"],
    "a list in dictionaries": lambda attention, layer: attention.BY_NAME["nested"]["deep"][0],
    "a dictionary's key": lambda attention, layer: next(iter(attention.BY_CLASS)),
    "a tuple": lambda attention, layer: attention.TUPLE[1],
    "a default": lambda attention, layer: attention.attend.__defaults__[0],
    "a dataclass default": lambda attention, layer: attention.Submodules().core,
    "a specification": lambda attention, layer: attention.SPEC.submodules.core,
    "a subclass's base": lambda attention, layer: attention.SelfAttention.__bases__[0],
}


@pytest.mark.parametrize("alias", CLASS_ALIASES)
@pytest.mark.parametrize("patch", [mixin, lambda target: replace(target, "glue:Alone")], ids=["mixin", "replace"])
@pytest.mark.guards(13)
def test_every_holder_of_a_class_follows(alias: str, patch: Any, attention: Any, layer: Any) -> None:
    original = attention.Attention
    patches = applied(patch(f"{ATTENTION}:Attention"))
    assert CLASS_ALIASES[alias](attention, layer) is attention.Attention is not original
    patches.undo()
    assert CLASS_ALIASES[alias](attention, layer) is attention.Attention is original


def test_a_staticmethod_that_wraps_a_function_follows(layer: Any) -> None:
    patches = applied(replace(f"{STATE}:get_size", "glue:size_of_42"))
    assert layer.Layer.measure() == 42
    assert layer.sizes() == (42, 42)
    patches.undo()
    assert layer.Layer.measure() == 1


def test_the_order_of_dictionaries_stays_and_undo_restores_every_object(attention: Any, state: Any) -> None:
    before = Snapshot(*PACKAGES)
    patches = [
        replace(f"{STATE}:get_size", "glue:size_of_42"),
        wrap("megatron.core.mpu:get_size", owner="beta"),
        wrap(f"{STATE}:scale"),
        mixin(f"{ATTENTION}:Attention"),
        mixin(f"{ATTENTION}:Base", "glue:Quiet"),
        wrap(f"{ATTENTION}:Base.shape"),
        wrap(f"{ATTENTION}:Attention.inherited"),
        put(f"{STATE}:HAVE_FAST", True),
        replace("megatron.core.jit:jit", "glue:other_compiler"),
        replace("fakelib:helper", "glue:marked"),
    ]
    for _ in range(2):
        keys = {name: list(vars(module)) for name, module in sys.modules.items() if name.startswith("megatron")}
        active = applied(*patches)
        assert before.differences(Snapshot(*PACKAGES)), "the patches did nothing"
        assert {name: list(vars(sys.modules[name])) for name in keys} == keys
        active.undo()
        assert before.differences(Snapshot(*PACKAGES)) == []


def test_a_replaced_function_runs_the_replacement_s_code_under_the_original_s_name(state: Any) -> None:
    import glue

    patches = applied(replace(f"{STATE}:scale", "glue:triple"))
    assert state.scale.__code__ is glue.triple.__code__
    assert (state.scale.__module__, state.scale.__qualname__) == (STATE, "scale")
    assert inspect.signature(state.scale) == inspect.signature(glue.triple)
    assert pickle.loads(pickle.dumps(state.scale)) is state.scale
    patches.undo()
    assert glue.triple.__module__ == "glue"


@pytest.mark.guards(32)
def test_wraps_nest_in_plan_order_around_a_replacement(state: Any) -> None:
    patches = applied(
        wrap(f"{STATE}:get_size", "glue:marked"),
        wrap(f"{STATE}:get_size", "glue:starred", "beta"),
        replace(f"{STATE}:get_size", "glue:size_of_7", "gamma"),
    )
    assert state.get_size() == ("starred", ("marked", 7))
    patches.undo()


def test_a_feature_works_on_what_the_base_plan_left(state: Any) -> None:
    ground = wrap(f"{STATE}:get_size", "glue:marked", "cpu-platform", ground=True)
    patches = applied(ground, wrap(f"{STATE}:get_size", "glue:starred"))
    assert state.get_size() == ("starred", ("marked", 1))
    patches.undo()
    patches = applied(ground, replace(f"{STATE}:get_size", "glue:size_of_7"))
    assert state.get_size() == 7
    patches.undo()
    assert state.get_size() == 1


def test_a_feature_patches_a_member_of_a_class_that_the_base_plan_replaced(attention: Any) -> None:
    patches = applied(replace(f"{ATTENTION}:Attention", "glue:Alone", ground=True), wrap(f"{ATTENTION}:Attention.forward"))
    assert attention.Attention().forward(1) == ("marked", ("alone", 1))
    assert attention.SelfAttention().forward(1) == ("self", "marked", ("alone", 1))
    patches.undo()
    assert attention.Attention().forward(1) == ("attention", "base", 1)


def test_mixins_stand_before_the_class_and_its_subclasses_follow(attention: Any) -> None:
    patches = applied(mixin(f"{ATTENTION}:Attention"), mixin(f"{ATTENTION}:Attention", "glue:Quiet", "beta"))
    assert attention.Attention().forward(1) == ("quiet", "loud", "attention", "base", 1)
    assert attention.SelfAttention().forward(1) == ("self", "quiet", "loud", "attention", "base", 1)
    patches.undo()
    assert attention.SelfAttention().forward(1) == ("self", "attention", "base", 1)


@pytest.mark.guards(44)
def test_a_patched_class_keeps_its_names_for_pickle(attention: Any) -> None:
    patches = applied(mixin(f"{ATTENTION}:Attention"))
    data = pickle.dumps(attention.Attention())
    assert type(pickle.loads(data)) is attention.Attention
    patches.undo()
    assert type(pickle.loads(data)) is attention.Attention


def test_glue_that_imports_what_it_patches_keeps_the_original(attention: Any, state: Any) -> None:
    import layers

    original = attention.Attention
    patches = applied(
        replace(f"{ATTENTION}:Attention", "layers:RingAttention"), replace(f"{STATE}:get_size", "layers:size_plus_one")
    )
    assert state.get_size() == 2
    assert attention.Attention().forward(1) == ("ring", "attention", "base", 1)
    assert layers.Attention is original
    assert layers.RingAttention.__bases__ == (original,)
    assert layers.Helper.__bases__ == (attention.Attention,)
    patches.undo()
    assert layers.Helper.__bases__ == (original,)


def test_descriptors_keep_their_kind(attention: Any) -> None:
    patches = applied(
        wrap(f"{ATTENTION}:Base.shape"),
        wrap(f"{ATTENTION}:Base.build"),
        replace(f"{ATTENTION}:Attention.forward", "glue:Alone.forward"),
    )
    assert attention.Attention.shape(1) == ("marked", ("shape", 1))
    assert attention.Attention.build(2) == ("marked", ("Attention", 2))
    assert attention.Attention().call(3) == ("alone", 3)
    assert type(vars(attention.Base)["shape"]) is staticmethod
    assert type(vars(attention.Base)["build"]) is classmethod
    patches.undo()


def test_a_staticmethod_takes_a_function_and_a_staticmethod(attention: Any) -> None:
    for value in ("glue:Alone.shape", "glue:triple"):
        patches = applied(replace(f"{ATTENTION}:Base.shape", value))
        assert type(vars(attention.Base)["shape"]) is staticmethod
        assert attention.Attention.shape(2) in (("alone", 2), 7)
        patches.undo()


def test_an_inherited_member_is_planted_on_the_class_alone(attention: Any) -> None:
    patches = applied(wrap(f"{ATTENTION}:Attention.inherited"))
    assert attention.Attention().inherited() == ("marked", "inherited")
    assert attention.SelfAttention().inherited() == ("marked", "inherited")
    assert attention.Base().inherited() == "inherited"
    patches.undo()
    assert "inherited" not in vars(attention.Attention)


def test_a_set_value_reaches_the_names_imported_from_the_site_and_no_equal_value(attention: Any, state: Any) -> None:
    import fakelib

    patches = applied(put(f"{STATE}:HAVE_FAST", True), put(f"{STATE}:LIMIT", 5))
    assert attention.enabled()[0] is True
    assert (state.LIMIT, state._size, fakelib.FLAG) == (5, 1, True)
    assert sys.modules["megatron.core.transformer.layer"].LIMIT == 5
    patches.undo()
    assert attention.enabled()[0] is False
    assert sys.modules["megatron.core.transformer.layer"].LIMIT == 1


def test_a_set_reference_is_bound_as_it_is(attention: Any, state: Any) -> None:
    import glue

    patches = applied(planned("alpha", Set(f"{STATE}:get_size", Ref("glue:size_of_42"), "a test")))
    assert state.get_size is glue.size_of_42
    assert attention.LIST[1] is glue.size_of_42
    patches.undo()
    assert attention.LIST[1] is state.get_size
    assert glue.size_of_42() == 42


def test_a_module_whose_import_failed_is_stood_in_for_by_a_value_alone(state: Any) -> None:
    import glue

    before = list(vars(state))
    patches = applied(planned("alpha", Set(f"{STATE}:no_such_accelerator", Ref("glue:Loud"), "a test")))
    assert state.no_such_accelerator is glue.Loud
    with patches.suspended(f"{STATE}:no_such_accelerator"):
        assert not hasattr(state, "no_such_accelerator")
    assert state.no_such_accelerator is glue.Loud
    patches.undo()
    assert list(vars(state)) == before
    assert failing(wrap(f"{STATE}:no_such_accelerator")).startswith(
        "MS401 alpha patches megatron.core.state:no_such_accelerator, which does not exist\n"
    )


def test_an_assigned_name_is_patched_without_its_value(attention: Any) -> None:
    import fakelib

    compiled = fakelib.compiled
    patches = applied(replace("megatron.core.jit:jit", "glue:other_compiler"))
    assert attention.jit(1) == ("compiled", 1)
    assert sys.modules["megatron.core.jit"].jit is attention.jit
    assert fakelib.compiled is sys.modules["megatron.core.jit"].compiled is compiled
    patches.undo()
    assert attention.jit is compiled


def test_a_name_in_another_package_is_rebound_under_all_its_names(state: Any) -> None:
    import fakelib

    patches = applied(wrap("fakelib:helper"))
    assert fakelib.alias_of_helper(1) == fakelib.TABLE["helper"](1) == ("marked", ("helper", 1))
    patches.undo()
    assert fakelib.alias_of_helper(1) == ("helper", 1)


def test_caches_are_cleared_when_patches_come_and_go(state: Any) -> None:
    assert state.table(2) == 2
    patches = applied(replace(f"{STATE}:get_size", "glue:size_of_42", clears=(f"{STATE}:table",)))
    assert state.table(2) == 84
    patches.undo()
    assert state.table(2) == 2


def test_a_value_that_the_program_changed_meanwhile_stays(state: Any) -> None:
    patches = applied(put(f"{STATE}:LIMIT", 5))
    state.LIMIT = 6
    patches.undo()
    assert state.LIMIT == 6


def test_skipped_patches_are_ignored(state: Any) -> None:
    wrong = planned("beta", Replace(f"{STATE}:get_size", "glue:gone", "a test"), skipped="only on npu")
    patches = applied(wrong)
    assert (patches.sites, state.get_size()) == ((), 1)
    patches.undo()


def test_the_report_names_site_owners_kinds_and_aliases(state: Any) -> None:
    patches = applied(replace("megatron.core.mpu:get_size", "glue:size_of_42"), wrap(f"{STATE}:get_size", owner="beta"))
    (site,) = patches.sites
    assert (site.site, site.owners, site.kinds, site.pending) == (
        f"{STATE}:get_size",
        ("alpha", "beta"),
        ("replace", "wrap"),
        False,
    )
    # attention, lazy, layer twice (its own name and by star), the list, the set, the staticmethod
    assert site.aliases == 7
    patches.undo()


@pytest.mark.guards(20)
def test_a_suspended_site_has_its_original_for_a_while(attention: Any, layer: Any, state: Any) -> None:
    patches = applied(
        wrap(f"{STATE}:get_size"),
        wrap(f"{ATTENTION}:Attention.inherited"),
        mixin(f"{ATTENTION}:Attention"),
        put(f"{STATE}:HAVE_FAST", True),
    )
    active = Snapshot(*PACKAGES)
    with patches.suspended("megatron.core.mpu:get_size"):
        assert (layer.sizes(), attention.LIST[1]()) == ((1, 1), 1)
        taken = attention.taken = state.get_size
    assert attention.taken is not taken
    del attention.taken
    with patches.suspended(f"{ATTENTION}:Attention"):
        assert attention.SelfAttention().forward(1) == ("self", "attention", "base", 1)
    with patches.suspended(f"{ATTENTION}:Attention.inherited"):
        assert attention.SelfAttention().inherited() == "inherited"
    with patches.suspended(f"{STATE}:HAVE_FAST"):
        assert attention.enabled()[0] is False
    assert active.differences(Snapshot(*PACKAGES)) == []
    patches.undo()


def test_only_a_patched_site_can_be_suspended(state: Any) -> None:
    patches = applied(wrap(f"{STATE}:get_size"))
    with pytest.raises(PatchError) as caught, patches.suspended(f"{STATE}:scale"):
        pass
    patches.undo()
    assert (
        str(caught.value)
        == "MS401 suspended() cannot put back the original of megatron.core.state:scale, because the active plan does not "
        "patch this target\n"
        "  fix: pass a target that the plan patches; mindspeed features plan --all lists them"
    )


def failing(*patches: PlannedPatch) -> str:
    before = Snapshot(*PACKAGES)
    with pytest.raises(PatchError) as caught:
        applied(
            replace(f"{STATE}:get_size", "glue:size_of_42", "first"), mixin(f"{ATTENTION}:Attention", owner="first"), *patches
        )
    assert before.differences(Snapshot(*PACKAGES)) == []
    return str(caught.value)


@pytest.mark.guards(19)
def test_a_replacement_that_cannot_be_imported_stops_everything(state: Any) -> None:
    text = failing(replace(f"{STATE}:scale", "glue:gone"), wrap(f"{STATE}:fused", "no_such_module:f", "beta"))
    assert text == (
        "MS406 replace of megatron.core.state:scale by alpha: glue:gone cannot be imported: "
        "AttributeError: module 'glue' has no attribute 'gone'\n"
        "  where: glue:gone\n  fix: correct this import, or install what it needs, or remove alpha\n"
        "MS406 wrap of megatron.core.state:fused by beta: no_such_module:f cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_module'\n"
        "  where: no_such_module:f\n  fix: correct this import, or install what it needs, or remove beta"
    )


@pytest.mark.parametrize(
    ("wrapper", "text"),
    [
        (
            "glue:broken",
            "MS406 the wrapper glue:broken of alpha failed on megatron.core.state:scale: ValueError: no\n  where: "
            "glue:broken\n  fix: remove alpha",
        ),
        (
            "glue:returns_none",
            "MS406 the wrapper glue:returns_none of alpha returned None, but must return a callable that replaces "
            "megatron.core.state:scale\n  where: glue:returns_none\n  fix: remove alpha",
        ),
    ],
)
@pytest.mark.guards(14)
def test_a_wrapper_that_fails_stops_everything(wrapper: str, text: str, state: Any) -> None:
    assert failing(wrap(f"{STATE}:scale", wrapper)) == text


@pytest.mark.guards(12)
def test_a_name_that_is_missing_at_run_time_stops_everything(state: Any) -> None:
    assert failing(wrap(f"{STATE}:only_when_fast")) == (
        "MS401 alpha patches megatron.core.state:only_when_fast, which does not exist\n"
        f"  where: {state.__file__}\n"
        "  fix: install a version of the patched package that alpha supports, or remove alpha"
    )
    assert failing(wrap("fakelib:helpers")).startswith("MS401 alpha patches fakelib:helpers, which does not exist\n")


def test_a_module_that_cannot_be_found_stops_everything(state: Any) -> None:
    text = failing(wrap("fakelib.missing:f"), wrap("no_such_package.module:f", owner="beta"))
    assert text == (
        "MS401 alpha patches fakelib.missing:f, which does not exist\n"
        "  fix: install a version of the patched package that alpha supports, or remove alpha\n"
        "MS401 beta patches no_such_package.module:f, which does not exist\n"
        "  fix: install a version of the patched package that beta supports, or remove beta"
    )


def test_a_class_is_not_replaced_by_a_function_and_a_function_takes_no_mixin(state: Any) -> None:
    why = "cannot be applied: glue:triple is not a class\n  fix: use Wrap or Replace"
    assert failing(replace(f"{ATTENTION}:Base", "glue:triple")) == f"MS403 the replace of {ATTENTION}:Base by alpha {why}"
    text = failing(mixin(f"{STATE}:scale"))
    assert text == (
        f"MS403 the mixin of {STATE}:scale by alpha cannot be applied: {STATE}:scale is not a class\n  fix: use Wrap or Replace"
    )


def test_a_member_of_a_compiled_class_cannot_change(state: Any) -> None:
    import fakelib

    fakelib.Compiled = dict
    try:
        assert failing(wrap("fakelib:Compiled.get")) == (
            "MS403 the wrap of fakelib:Compiled.get by alpha cannot be applied: dict is compiled and cannot be patched\n"
            "  fix: patch the name in a Python module that uses it"
        )
    finally:
        del fakelib.Compiled


def test_two_names_of_one_object_outside_megatron_are_found_when_applied(state: Any) -> None:
    assert failing(wrap("fakelib:helper"), wrap("fakelib:alias_of_helper", owner="beta")) == (
        "MS402 fakelib:alias_of_helper and fakelib:helper are two names of one object, and both are patched\n"
        "  fix: patch the name in the module that defines it"
    )


def test_two_names_of_one_object_may_be_set_to_the_same(state: Any) -> None:
    import fakelib

    original = fakelib.helper
    names = ("fakelib:helper", "fakelib:alias_of_helper")
    patches = applied(*(planned("alpha", Set(name, Ref("glue:triple"), "a test")) for name in names))
    assert fakelib.helper is fakelib.alias_of_helper is sys.modules["glue"].triple
    assert [patches.holds(name) for name in names] == [True, True]
    assert [site.pending for site in patches.sites] == [False, False]
    patches.undo()
    assert fakelib.helper is fakelib.alias_of_helper is original
    with pytest.raises(PatchError, match="are two names of one object"):
        applied(planned("alpha", Set(names[0], Ref("glue:triple"), "a test")), planned("alpha", Set(names[1], 3, "a test")))


def test_a_subclass_that_cannot_follow_stops_everything(attention: Any) -> None:
    class Solid(attention.Base):  # type: ignore[name-defined, misc]
        __slots__ = ("x",)

    class Odd(int):
        def forward(self, x: object) -> object:
            return x

    attention.Odd = Odd
    try:
        text = failing(replace(f"{ATTENTION}:Base", f"{ATTENTION}:Odd"))
    finally:
        del attention.Odd
    assert text.startswith(f"MS404 {ATTENTION}.")
    assert "cannot inherit from the patched version of its base class: " in text


def test_a_subclass_that_is_set_to_another_class_keeps_its_bases(state: Any) -> None:
    import fakelib

    class Stream(int):
        """Has a layout of its own, as torch.cuda.Stream has in a build for CUDA."""

    class ExternalStream(Stream):
        pass

    fakelib.Stream, fakelib.ExternalStream = Stream, ExternalStream
    try:
        names = ("fakelib:Stream", "fakelib:ExternalStream")
        patches = applied(*(planned("alpha", Set(name, Ref("glue:Loud"), "a test")) for name in names))
        assert fakelib.Stream is fakelib.ExternalStream is sys.modules["glue"].Loud
        patches.undo()
        assert (fakelib.Stream, fakelib.ExternalStream, ExternalStream.__bases__) == (Stream, ExternalStream, (Stream,))
    finally:
        del fakelib.Stream, fakelib.ExternalStream


def test_a_wrapped_class_attribute_that_is_defined_elsewhere_is_patched_alone(layer: Any, state: Any) -> None:
    patches = applied(planned("alpha", Wrap("megatron.core.transformer.layer:Layer.measure", "glue:marked", "a test")))
    assert layer.Layer.measure() == ("marked", 1)
    assert state.get_size() == layer.size_of() == 1
    patches.undo()
    assert layer.Layer.measure() == 1


def test_a_wrapper_may_hand_out_a_function_that_others_hold(state: Any) -> None:
    import glue

    patches = applied(wrap(f"{STATE}:scale", "glue:handing_out_what_others_hold"))
    assert state.scale(2) == 7
    patches.undo()
    assert state.scale(2) == 4
    assert glue.triple(2) == glue._kept[0](2) == 7


def test_a_wrapper_may_leave_the_original(state: Any) -> None:
    original = state.scale
    patches = applied(wrap(f"{STATE}:scale", "glue:unchanged"))
    assert state.scale is original
    patches.undo()
    assert state.scale is original
