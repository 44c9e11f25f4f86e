import platform
import sys
import typing

import pytest

from mindspeed.engine.inspection.megatron_copies import (
    MegatronCopy,
    megatron_copies,
    megatron_version,
    mixed_roots,
    package_root,
    python_problem,
)


def copy_of_megatron(folder, *packages, version=(0, 16, 1), pre_release="", init=False):
    root = folder / "megatron"
    for package in packages:
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    if init:
        (root / "__init__.py").write_text("raise RuntimeError('imported')\n")
    if "core" in packages:
        numbers = "".join(f"{name} = {n}\n" for name, n in zip(("MAJOR", "MINOR", "PATCH"), version, strict=True))
        (root / "core" / "package_info.py").write_text(f"{numbers}PRE_RELEASE = {pre_release!r}\nVERSION = (MAJOR, MINOR)\n")
    return root


@pytest.fixture
def path(monkeypatch, tmp_path):
    """Replace sys.path by these folders, as if megatron had not been imported."""
    monkeypatch.delitem(sys.modules, "megatron", raising=False)

    def use(*folders):
        monkeypatch.setattr(sys, "path", [str(tmp_path / folder) for folder in folders])

    return use


@pytest.mark.guards(1, 3)
def test_the_first_copy_on_the_path_wins_and_nothing_is_imported(tmp_path, path):
    first = copy_of_megatron(tmp_path / "a", "core", version=(0, 17, 0), pre_release="rc1")
    second = copy_of_megatron(tmp_path / "b", "core", "training")
    path("a", "b")
    assert megatron_version() == "0.17.0rc1"
    assert megatron_copies() == (MegatronCopy(first, "0.17.0rc1", True), MegatronCopy(second, "0.16.1", False))
    path("b", "a")
    assert megatron_version() == "0.16.1"


def test_a_regular_package_hides_every_namespace_portion(tmp_path, path):
    copy_of_megatron(tmp_path / "a", "core", version=(0, 17, 0))
    regular = copy_of_megatron(tmp_path / "b", "core", init=True)
    path("a", "b")
    assert package_root("core") == regular
    assert [(copy.version, copy.wins) for copy in megatron_copies()] == [("0.16.1", True), ("0.17.0", False)]


def test_without_megatron_there_is_no_version(tmp_path, path):
    path("a")
    assert megatron_version() is None
    assert megatron_copies() == ()
    assert mixed_roots() is None


@pytest.mark.guards(3)
def test_a_copy_that_does_not_tell_its_version_has_none(tmp_path, path):
    root = copy_of_megatron(tmp_path / "a", "core")
    (root / "core" / "package_info.py").write_text("MAJOR = (\n")
    path("a")
    assert megatron_copies() == (MegatronCopy(root, None, True),)


@pytest.mark.guards(2)
def test_core_and_training_of_different_copies_are_a_problem(tmp_path, path):
    core = copy_of_megatron(tmp_path / "a", "core")
    training = copy_of_megatron(tmp_path / "b", "core", "training")
    path("b")
    assert mixed_roots() is None
    path("a", "b")
    assert str(mixed_roots()) == (
        f"MS408 megatron.core comes from {core / 'core'} and megatron.training from {training / 'training'}\n"
        f"  fix: put {tmp_path / 'b'} first on PYTHONPATH, or uninstall the other copy"
    )


@pytest.mark.parametrize(("needed", "too_old"), [(">=3.12", True), (">=3.10", False), (None, False)])
def test_a_python_that_is_too_old_for_a_megatron_is_one_sentence(tmp_path, monkeypatch, needed, too_old):
    copy_of_megatron(tmp_path, "core", "training", version=(0, 19, 1))
    if needed is not None:
        (tmp_path / "pyproject.toml").write_text(f'[project]\nrequires-python = "{needed}"\n')
    monkeypatch.setattr(platform, "python_version", lambda: "3.11.7")
    monkeypatch.delattr(typing, "override", raising=False)
    text = (
        "MS502 Megatron-LM 0.19.1 needs Python >=3.12, but this is 3.11.7\n"
        f"  where: {tmp_path}\n"
        "  fix: start the job with a newer Python, or use Megatron-LM 0.16.1"
    )
    assert str(python_problem(tmp_path)) == (text if too_old else "None")
    monkeypatch.setattr(typing, "override", lambda function: function, raising=False)
    assert python_problem(tmp_path) is None
