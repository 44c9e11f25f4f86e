import json
import sys

import pytest

from mindspeed.workbench.diagnostics import doctor


@pytest.fixture
def examined(mindspeed, monkeypatch):
    """The findings of ``doctor --json`` by subject, torch's own answer made up: ``examined(torch={...})``."""

    def run(torch=None, status=0):
        answer = {"version": "2.13.0", "gloo": True, "cuda": None, "gpus": []} if torch is None else torch
        monkeypatch.setattr(doctor, "probe_torch", lambda: answer)
        done = mindspeed("doctor", "--json")
        assert (done.exit_code, done.stderr) == (status, "")
        found: dict[str, list[dict[str, str]]] = {}
        for finding in json.loads(done.stdout)["findings"]:
            found.setdefault(finding["subject"], []).append(finding)
        return found

    return run


def fake_megatron(folder, version):
    package = folder / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    major, minor, patch = version.split(".")
    (package / "package_info.py").write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n")
    return folder / "megatron"


def test_torch_and_megatron_are_really_probed(mindspeed):
    done = mindspeed("doctor")
    assert done.exit_code == 0, done.output
    subjects = [line[:20].strip() for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert subjects[:4] == ["python", "mindspeed", "torch", "gloo"]
    assert {"megatron-core", "cpu", "C++ compiler", "features", "platform"} <= set(subjects)


def test_a_torch_that_cannot_be_imported_is_a_finding_with_its_last_words(examined):
    (finding,) = examined(torch={"error": "ImportError: undefined symbol: _ZN3c10"}, status=3)["torch"]
    assert finding == {
        "subject": "torch",
        "value": "cannot be imported: ImportError: undefined symbol: _ZN3c10",
        "state": "missing",
        "fix": "reinstall it: pip install 'mindspeed[train]'",
    }


@pytest.mark.guards(4, processes=True)
def test_a_crash_of_the_probed_import_is_caught(monkeypatch):
    monkeypatch.setattr(doctor, "_PROBE", "import os; os.abort()")
    assert doctor.probe_torch() == {"error": "the import ended with status -6"}


@pytest.mark.guards(1)
def test_every_copy_of_megatron_is_shown_and_the_first_wins(examined, tmp_path, monkeypatch):
    roots = [fake_megatron(tmp_path / "first", "0.16.1"), fake_megatron(tmp_path / "second", "0.12.1")]
    for root in reversed(roots):
        monkeypatch.syspath_prepend(str(root.parent))
    winner, loser, *_ = examined()["megatron-core"]
    assert (winner["value"], winner["state"]) == (f"0.16.1 ({roots[0]}), a tested release", "ok")
    assert (loser["value"], loser["state"]) == (f"0.12.1 ({roots[1]}), never imported: the first one is used", "warning")


def test_a_release_that_is_not_tested_is_told(examined, tmp_path, monkeypatch):
    root = fake_megatron(tmp_path, "0.18.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    winner = examined()["megatron-core"][0]
    assert (winner["state"], winner["fix"]) == ("warning", "mindspeed patches drift")
    assert winner["value"].startswith(f"0.18.0 ({root}), which is not tested; tested releases: 0.14.0, ")


def test_an_unsupported_megatron_says_what_is_needed(examined, tmp_path, monkeypatch):
    root = fake_megatron(tmp_path, "0.12.1")
    monkeypatch.syspath_prepend(str(tmp_path))
    winner = examined(status=3)["megatron-core"][0]
    assert winner["value"] == f"0.12.1 ({root}) is not supported; supported is >=0.14,<0.21"
    assert winner["fix"] == "pip install megatron-core==0.16.1"


def test_a_missing_package_says_what_it_is_for_and_how_to_get_it(examined, monkeypatch):
    find = doctor.find_spec
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name in ("psutil", "matplotlib") else find(name))
    found = examined(status=3)
    assert found["psutil"][0]["value"] == "not installed; it is for saving checkpoints (Megatron hangs without it)"
    assert (found["psutil"][0]["state"], found["psutil"][0]["fix"]) == ("missing", "pip install psutil")
    assert found["matplotlib"][0]["state"] == "optional"


def test_without_torch_and_megatron_the_report_still_comes(examined, monkeypatch):
    find = doctor.find_spec
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "torch" else find(name))
    monkeypatch.setattr(doctor, "megatron_copies", lambda: ())
    found = examined(torch={"error": "ModuleNotFoundError: No module named 'torch'"}, status=3)
    missing = {name: rows[0]["fix"] for name, rows in found.items() if rows[0]["state"] == "missing"}
    assert missing == {"torch": "pip install 'mindspeed[train]'", "megatron-core": "pip install 'mindspeed[train]'"}


def test_a_broken_plugin_is_a_warning(examined, install, tmp_path):
    install("acme", {"acme-clip": ""})
    (tmp_path / "acme_features.py").write_text("import no_such_package")
    (finding,) = examined()["acme-clip"]
    assert finding["state"] == "warning"
    assert finding["value"].startswith("MS101 feature acme-clip cannot be loaded: ModuleNotFoundError")
    sys.modules.pop("acme_features", None)
