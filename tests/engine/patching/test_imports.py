"""Patches of modules that are not imported yet, and modules that are imported while patches are active."""

import importlib
import importlib.util
import inspect
import pickle
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from mindspeed.engine.planning.plan import PlannedPatch
from mindspeed.plugins.patches import Wrap
from mindspeed.problems import PatchError
from tests.engine.patching.patch_cases import ATTENTION, STATE, applied, mixin, put, replace, wrap
from tests.engine.patching.patch_fixtures import fake_megatron  # noqa: F401
from tests.engine.patching.patch_process import described
from tests.engine.patching.patch_snapshots import Snapshot

pytestmark = pytest.mark.usefixtures("fake_megatron")
PACKAGES = ("megatron", "fakelib", "glue", "layers", "circular_glue")


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def user_module(folder: Path, text: str) -> ModuleType:
    """A module of the user's, imported from a file."""
    (folder / "user_code.py").write_text(text)
    spec = importlib.util.spec_from_file_location("user_code", folder / "user_code.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["user_code"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_is_imported_by_applying() -> None:
    patches = applied(replace(f"{STATE}:get_size", "glue:size_of_42"), mixin(f"{ATTENTION}:Attention"))
    assert [name for name in sys.modules if name.partition(".")[0] in PACKAGES] == []
    assert [site.pending for site in patches.sites] == [True, True]
    patches.undo()


def test_a_target_is_patched_right_after_its_module_has_run() -> None:
    patches = applied(
        replace("megatron.core.mpu:get_size", "glue:size_of_42"),
        replace("megatron.core.jit:jit", "glue:other_compiler"),
        mixin(f"{ATTENTION}:Attention"),
        wrap(f"{ATTENTION}:Attention.inherited"),
        put(f"{STATE}:HAVE_FAST", True),
    )
    layer = load("megatron.core.transformer.layer")
    attention = sys.modules[ATTENTION]
    assert layer.sizes() == (42, 42)
    assert attention.enabled()[0] is True
    assert attention.jit(1) == ("compiled", 1)
    assert layer.Layer().forward(1) == ("loud", "attention", "base", 1)
    assert attention.SelfAttention().forward(1) == ("self", "loud", "attention", "base", 1)
    assert attention.SPEC.submodules.core is attention.Attention
    assert attention.Submodules().core is attention.attend.__defaults__[0] is attention.Attention
    assert [site.pending for site in patches.sites] == [False] * 5
    patches.undo()
    assert layer.sizes() == (1, 1)
    assert attention.Submodules().core is attention.Attention is layer.CoreAttention
    assert attention.SelfAttention().forward(1) == ("self", "attention", "base", 1)


def test_modules_and_their_specs_look_as_without_patches() -> None:
    patches = applied(wrap(f"{STATE}:get_size"))
    module = load(STATE)
    assert module.__spec__ is not None
    assert type(module.__loader__) is type(module.__spec__.loader) is type(load("glue").__loader__)
    assert inspect.getsource(module).startswith('"""Stands for parallel_state')
    spec = importlib.util.find_spec(ATTENTION)
    assert spec is not None
    assert spec.loader is not None
    assert inspect.isfunction(module.scale)
    assert "class Attention" in spec.loader.get_source(ATTENTION)  # type: ignore[attr-defined]
    patches.undo()


def test_undo_leaves_the_state_of_modules_imported_meanwhile_as_a_second_import_would_have_it() -> None:
    patches = [
        replace(f"{STATE}:get_size", "glue:size_of_42"),
        wrap(f"{STATE}:scale"),
        mixin(f"{ATTENTION}:Attention"),
        put(f"{STATE}:HAVE_FAST", True),
        replace("megatron.core.jit:jit", "glue:other_compiler"),
    ]
    active = applied(*patches)
    load("megatron.core.transformer.layer")
    active.undo()
    after = Snapshot(*PACKAGES)
    active = applied(*patches)
    active.undo()
    assert after.differences(Snapshot(*PACKAGES)) == []


def test_a_user_module_imported_meanwhile_gets_the_originals_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(ATTENTION)
    monkeypatch.setitem(sys.modules, "user_code", ModuleType("user_code"))
    patches = applied(
        replace(f"{STATE}:get_size", "glue:size_of_42"), mixin(f"{ATTENTION}:Attention"), put(f"{STATE}:LIMIT", 5)
    )
    user = user_module(
        tmp_path,
        "from megatron.core.state import get_size as size, LIMIT as limit\n"
        "from megatron.core.transformer.attention import Attention\n"
        "five = 5\n"
        "class Mine(Attention):\n"
        "    kept = {'size': size, 'class': [Attention]}\n"
        "    def forward(self, x, size=size):\n"
        "        return ('mine', size(), *super().forward(x))\n",
    )
    assert user.Mine().forward(1) == ("mine", 42, "loud", "attention", "base", 1)
    patches.undo()
    attention = sys.modules[ATTENTION]
    assert user.Mine().forward(1) == ("mine", 1, "attention", "base", 1)
    assert (user.limit, user.five) == (1, 5)
    assert user.size is sys.modules[STATE].get_size is user.Mine.kept["size"]
    assert user.Mine.kept["class"][0] is user.Attention is attention.Attention
    assert user.Mine.__bases__ == (attention.Attention,)


def test_glue_that_imports_its_target_is_imported_when_the_target_has_run() -> None:
    patches = applied(replace(f"{ATTENTION}:Attention", "layers:RingAttention"))
    assert "layers" not in sys.modules
    attention = load(ATTENTION)
    assert attention.Attention().forward(1) == ("ring", "attention", "base", 1)
    patches.undo()
    assert sys.modules["layers"].Attention is attention.Attention


def test_an_alias_made_by_a_circular_import_follows_when_the_import_ends() -> None:
    patches = applied(wrap("megatron.core.circular_a:early"))
    module = load("megatron.core.circular_a")
    assert module.both() == (("marked", "early"), ("marked", "early"))
    patches.undo()
    assert module.both() == ("early", "early")


def test_glue_that_needs_what_is_half_imported_is_tried_again_when_the_import_ends() -> None:
    patches = applied(replace("megatron.core.circular_c:third", "circular_glue:third_too"))
    module = load("megatron.core.circular_a")
    assert sys.modules["megatron.core.circular_c"].third() == module.third() == "replaced"
    patches.undo()
    assert module.third() == "third"


def test_a_module_that_is_reloaded_or_imported_again_is_patched_again() -> None:
    state = load(STATE)
    patches = applied(wrap(f"{STATE}:get_size"))
    importlib.reload(state)
    assert state.get_size() == ("marked", 1)
    del sys.modules[STATE]
    again = load(STATE)
    assert again is not state
    assert again.get_size() == ("marked", 1)
    patches.undo()
    assert (state.get_size(), again.get_size()) == (1, 1)


@pytest.mark.guards("20b")
def test_a_name_that_a_reload_leaves_is_not_patched_twice() -> None:
    state = load(STATE)
    state.extra = state.scale
    target = PlannedPatch("alpha", Wrap(f"{STATE}:extra", "glue:marked", "a test"), f"{STATE}:extra")
    patches = applied(target)
    importlib.reload(state)
    assert state.extra(1) == ("marked", 2)
    patches.undo()
    assert state.extra(1) == 2


def test_glue_that_never_can_be_imported_fails_every_import_until_it_is_undone() -> None:
    patches = applied(replace("megatron.core.circular_c:third", "glue:gone"))
    for _ in range(2):
        with pytest.raises(PatchError, match="glue:gone cannot be imported"):
            load("megatron.core.circular_a")
    patches.undo()
    assert load("megatron.core.circular_a").third() == "third"


def test_a_patch_that_fails_at_import_names_the_feature_and_fails_the_import() -> None:
    patches = applied(replace(f"{STATE}:get_size", "glue:gone"))
    with pytest.raises(PatchError) as caught:
        load(STATE)
    patches.undo()
    assert str(caught.value) == (
        "MS406 replace of megatron.core.state:get_size by alpha: glue:gone cannot be imported: "
        "AttributeError: module 'glue' has no attribute 'gone'\n"
        "  where: glue:gone\n  fix: correct this import, or install what it needs, or remove alpha"
    )
    assert load(STATE).get_size() == 1


def test_a_missing_module_stops_everything_at_once() -> None:
    before = list(sys.meta_path)
    with pytest.raises(PatchError) as caught:
        applied(wrap("megatron.core.stat:get_size"))
    assert sys.meta_path == before
    assert str(caught.value) == (
        "MS401 alpha patches megatron.core.stat:get_size, which does not exist\n"
        "  fix: did you mean megatron.core.state:get_size?"
    )


def test_pickles_written_meanwhile_are_read_without_patches() -> None:
    patches = applied(mixin(f"{ATTENTION}:Attention"), wrap(f"{STATE}:scale"))
    attention = load(ATTENTION)
    data = pickle.dumps([attention.Attention, sys.modules[STATE].scale])
    patches.undo()
    assert pickle.loads(data) == [attention.Attention, sys.modules[STATE].scale]


def test_a_pending_site_can_be_suspended() -> None:
    patches = applied(wrap(f"{STATE}:get_size"))
    with patches.suspended(f"{STATE}:get_size"):
        pass
    assert load(STATE).get_size() == ("marked", 1)
    patches.undo()


def test_imports_in_several_threads_are_all_patched() -> None:
    patches = applied(
        wrap(f"{STATE}:get_size"),
        wrap("megatron.core.circular_a:early"),
        wrap("fakelib:helper"),
        mixin(f"{ATTENTION}:Attention"),
    )
    names = (STATE, ATTENTION, "megatron.core.circular_a", "fakelib", "megatron.core.transformer.layer")
    threads = [threading.Thread(target=load, args=(name,)) for name in names * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [site.pending for site in patches.sites] == [False] * 4
    assert sys.modules["megatron.core.transformer.layer"].sizes() == (("marked", 1), ("marked", 1))
    patches.undo()


def test_the_state_after_undo_is_that_of_a_process_without_us() -> None:
    """Compared between fresh processes by what the objects are and how they are shared."""
    without = described("never")
    assert described("before") == without
    assert described("after") == without
    assert described("kept") != without


def test_a_patch_of_megatron_lm_waits_until_a_checkout_is_on_the_path(tmp_path: Path) -> None:
    patches = applied(wrap("megatron.training.loop:one_step"))
    assert [(site.site, site.pending) for site in patches.sites] == [("megatron.training.loop:one_step", True)]
    package = tmp_path / "training"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "loop.py").write_text("def one_step():\n    return 'stepped'\n")
    load("megatron").__path__.append(str(tmp_path))
    loop = load("megatron.training.loop")
    assert loop.one_step() == ("marked", "stepped")
    patches.undo()
    assert loop.one_step() == "stepped"


def test_a_misspelt_package_is_not_one_of_a_checkout() -> None:
    with pytest.raises(PatchError) as missing:
        applied(wrap("megatron.trainings.loop:one_step"))
    assert [problem.code for problem in missing.value.problems] == ["MS401"]
