"""Where a target is bound, read from source text alone."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from mindspeed.engine.inspection.contract_reading import barrier_of
from mindspeed.engine.inspection.sites import find_site, follows_to, may_import, near_targets
from mindspeed.engine.inspection.source import find_module
from tests.engine.patching.patch_fixtures import fake_megatron  # noqa: F401

pytestmark = pytest.mark.usefixtures("fake_megatron")
ATTENTION = "megatron.core.transformer.attention"


def named(target: str) -> tuple[str, str]:
    site = find_site(target)
    assert site is not None
    return site.name, site.kind


@pytest.mark.parametrize(
    ("target", "site", "kind"),
    [
        ("megatron.core.state:get_size", "megatron.core.state:get_size", "function"),
        ("megatron.core.mpu:get_size", "megatron.core.state:get_size", "function"),
        ("megatron.core:mpu.get_size", "megatron.core.state:get_size", "function"),
        ("megatron.core.transformer.layer:size_of", "megatron.core.state:get_size", "function"),
        ("megatron.core.transformer.layer:scale", "megatron.core.state:scale", "function"),
        ("megatron.core.transformer.layer:CoreAttention", f"{ATTENTION}:Attention", "class"),
        ("megatron.core.transformer.layer:CoreAttention.forward", f"{ATTENTION}:Attention.forward", "method"),
        (f"{ATTENTION}:Attention.inherited", f"{ATTENTION}:Attention.inherited", "method"),
        (f"{ATTENTION}:Attention.__init__", f"{ATTENTION}:Attention.__init__", "method"),
        (f"{ATTENTION}:Config.__init__", f"{ATTENTION}:Config.__init__", "method"),
        (f"{ATTENTION}:Attention.call", f"{ATTENTION}:Attention.call", "assignment"),
        (f"{ATTENTION}:SPEC", f"{ATTENTION}:SPEC", "assignment"),
        ("megatron.core.jit:jit", "megatron.core.jit:jit", "assignment"),
        ("megatron.core.transformer.layer:CoreAttention.build", f"{ATTENTION}:Attention.build", "method"),
        ("megatron.core.state:fused", "megatron.core.state:fused", "branches"),
        ("megatron.core.state:only_when_fast", "megatron.core.state:only_when_fast", "function"),
        (f"{ATTENTION}:jit", "megatron.core.jit:jit", "assignment"),
        (f"{ATTENTION}:functools", None, None),
        ("megatron.core.state:no_such_accelerator", "megatron.core.state:no_such_accelerator", "import"),
        ("megatron.core.jit:compiled", "megatron.core.jit:compiled", "assignment"),
        ("fakelib:alias_of_helper", "fakelib:alias_of_helper", "outside"),
        ("fakelib:no_such_name", "fakelib:no_such_name", "outside"),
        ("fakelib.no_such_module:x", None, None),
        ("no_such_package.module:x", "no_such_package.module:x", "absent"),
        ("megatron.core.state:no_such_name", None, None),
        ("megatron.core.no_such_module:x", None, None),
        (f"{ATTENTION}:Attention.no_such_member", None, None),
        (f"{ATTENTION}:attend.member", None, None),
    ],
)
def test_a_target_is_followed_to_its_last_definition(target: str, site: str | None, kind: str | None) -> None:
    found = find_site(target)
    assert (found and found.name, found and found.kind) == (site, kind)


def test_nothing_is_imported() -> None:
    find_site("megatron.core.transformer.layer:CoreAttention.forward")
    assert not [name for name in sys.modules if name.partition(".")[0] in ("megatron", "fakelib")]


def test_a_site_knows_its_file_and_line(fake_megatron: Path) -> None:  # noqa: F811
    site = find_site("megatron.core.mpu:get_size")
    assert site is not None
    source = Path(site.file).read_text().splitlines()
    assert Path(site.file) == fake_megatron / "megatron/core/state.py"
    assert source[site.line - 1] == "def get_size():"


@pytest.mark.parametrize(
    ("name", "barrier"),
    [
        ("Attention", ""),
        ("Config", "the target is a dataclass"),
        ("Named", "the class refers to itself by super(Named, ...) (line {}), which would mean the new class"),
        ("Explicit", "the class refers to itself by Explicit.reset(...) (line {}), which would mean the new class"),
    ],
)
def test_a_class_that_names_itself_or_is_a_dataclass_has_a_barrier(name: str, barrier: str) -> None:
    site = find_site(f"{ATTENTION}:{name}")
    assert site is not None
    lines = Path(site.file).read_text().splitlines()
    line = 1 + next((i for i, text in enumerate(lines) if f"super({name}" in text or f"{name}.reset" in text), 0)
    assert barrier_of(site) == barrier.format(line)


def test_near_names_come_from_the_module_the_class_and_its_bases() -> None:
    assert near_targets("megatron.core.state:initialise") == ["megatron.core.state:initialize"]
    assert near_targets(f"{ATTENTION}:Attention.inherit") == [f"{ATTENTION}:Attention.inherited"]


def test_near_names_find_a_definition_that_moved() -> None:
    assert near_targets("megatron.core.jit:get_size") == ["megatron.core.state:get_size"]
    assert near_targets("megatron.core.parallel_state:get_size") == ["megatron.core.state:get_size"]


def test_imports_are_followed_back_to_a_site() -> None:
    assert follows_to(f"{ATTENTION}:jit", "megatron.core.jit:jit")
    assert follows_to("megatron.core.transformer.layer:LIMIT", "megatron.core.state:LIMIT")
    assert not follows_to("megatron.core.jit:compiled", "megatron.core.jit:jit")


def test_a_changed_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "megatron"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "later.py").write_text("def one(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert named("megatron.later:one") == ("megatron.later:one", "function")
    (package / "later.py").write_text("one = 1\nother = 2\n")
    assert named("megatron.later:one") == ("megatron.later:one", "assignment")


def test_a_namespace_package_is_found_over_all_its_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for portion, name in (("a", "first"), ("b", "second")):
        folder = tmp_path / portion / "spread" / "inner"
        folder.mkdir(parents=True)
        (folder / f"{name}.py").write_text("x = 1\n")
        monkeypatch.syspath_prepend(str(tmp_path / portion))
    for name in ("first", "second"):
        module = find_module(f"spread.inner.{name}")
        assert module is not None
        assert module.file is not None
        assert Path(module.file).name == f"{name}.py"


def test_a_name_bound_in_branches_is_no_definition_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "megatron"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "choice.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from megatron.nowhere import Hint\n"
        "try:\n    from fast import Norm\nexcept ImportError:\n    Norm = None\n"
        "with open('x') as handle:\n    def inside(): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert named("megatron.choice:Norm") == ("megatron.choice:Norm", "branches")
    assert named("megatron.choice:Norm.forward") == ("megatron.choice:Norm.forward", "branches")
    assert named("megatron.choice:inside") == ("megatron.choice:inside", "function")
    assert find_site("megatron.choice:Hint") is None


@pytest.mark.parametrize(
    ("text", "key", "may"),
    [
        ("from megatron.core.state import FLAG", "FLAG", True),
        ("from megatron.core.state import FLAG as OTHER", "OTHER", True),
        ("from megatron.core.state import (\n    LIMIT,\n    FLAG as OTHER,  # why (not)\n)", "OTHER", True),
        ("from megatron.core.state import LIMIT, \\\n  FLAG", "FLAG", True),
        ("try: from megatron.core.state import FLAG\nexcept ImportError: FLAG = True", "FLAG", True),
        ("from megatron.core.state import *", "FLAG", True),
        ("from megatron.core.state import *", "OTHER", False),
        ("FLAG = True\nif FLAG:\n    assert FLAG, 'wanted'", "FLAG", False),
        ("from megatron.core.state import FLAG_OF_ANOTHER", "FLAG", False),
        ("print(FLAG, 1)", "FLAG", False),
    ],
)
def test_what_may_import_a_name_is_told_without_parsing(
    text: str, key: str, may: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("importing")
    module.__file__ = str(tmp_path / "importing.py")
    Path(module.__file__).write_text(text, encoding="utf-8")
    monkeypatch.setitem(sys.modules, "importing", module)
    assert may_import("importing", "FLAG", key) is may


def test_a_name_from_a_missing_module_of_that_name_has_no_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "megatron" / "steps"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("from megatron.steps.step import step\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_site("megatron.steps.step:step") is None
