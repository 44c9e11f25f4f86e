"""``mindspeed doctor`` on Ascend machines that are made up: a tree of files and a few variables."""

import os
from pathlib import Path

import pytest

from mindspeed.workbench.diagnostics import ascend, doctor
from mindspeed.workbench.diagnostics.ascend import AscendHost

CANN = "usr/local/Ascend/ascend-toolkit/latest"


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def npu_smi(tmp_path):
    """A tool of that name that prints a text and ends with a status: gives the ``PATH`` on which it lies."""

    def make(says, status=0):
        tool = tmp_path / "bin" / "npu-smi"
        put(tmp_path, {"bin/npu-smi": f"#!/bin/sh\necho '{says}'\nexit {status}\n"})
        tool.chmod(0o755)
        return f"{tool.parent}{os.pathsep}{os.defpath}"

    return make


@pytest.fixture
def complete(tmp_path, npu_smi):
    """A machine with everything: its tree, and the variables of a shell that sourced both scripts."""
    put(
        tmp_path,
        {
            "dev/davinci0": "",
            "dev/davinci1": "",
            "dev/davinci_manager": "",
            "usr/local/Ascend/driver/version.info": "Version=25.2.0\nascendhal_version=7.35.23\n",
            "usr/local/Ascend/firmware/version.info": "Version=7.7.0.6.236\n",
            f"{CANN}/x86_64-linux/ascend_toolkit_install.info": "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\n",
            f"{CANN}/opp/built-in/op_impl/ai_core/tbe/kernel/ascend910b/add.o": "",
            f"{CANN}/opp/built-in/op_impl/ai_core/tbe/kernel/config/a.json": "",
            "usr/local/Ascend/ascend-toolkit/set_env.sh": "",
            "usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_1/lib/libatb.so": "",
            "usr/local/Ascend/nnal/atb/set_env.sh": "",
        },
    )
    environ = {
        "ASCEND_HOME_PATH": f"/{CANN}",
        "ASCEND_TOOLKIT_HOME": f"/{CANN}",
        "ATB_HOME_PATH": "/usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_1",
        "PATH": npu_smi("| npu-smi 25.2.0   Version: 25.2.0 |"),
    }
    return tmp_path, environ


def found(root, environ):
    return {finding.subject: finding for finding in ascend.findings(AscendHost(root, environ))}


def test_a_machine_without_anything_of_ascend_has_no_findings(tmp_path):
    assert list(ascend.findings(AscendHost(tmp_path, {}))) == []


def test_every_layer_is_shown_with_its_version(complete):
    root, environ = complete
    assert {name: (row.value, row.state, row.fix) for name, row in found(root, environ).items()} == {
        "ascend driver": (f"25.2.0 ({root}/usr/local/Ascend/driver/version.info)", "ok", ""),
        "ascend firmware": (f"7.7.0.6.236 ({root}/usr/local/Ascend/firmware/version.info)", "ok", ""),
        "npu-smi": ("npu-smi 25.2.0   Version: 25.2.0", "ok", ""),
        "CANN toolkit": (f"8.3.RC1 ({root}/{CANN})", "ok", ""),
        "ASCEND_HOME_PATH": (f"/{CANN}", "ok", ""),
        "ASCEND_TOOLKIT_HOME": (f"/{CANN}", "ok", ""),
        "CANN kernels": ("ascend910b", "ok", ""),
        "NNAL (ATB)": ("/usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_1", "ok", ""),
    }


def test_cards_without_any_software_miss_everything_that_training_needs(tmp_path):
    put(tmp_path, {"dev/davinci0": ""})
    rows = found(tmp_path, {"PATH": str(tmp_path)})
    assert {name: row.state for name, row in rows.items()} == {
        "ascend driver": "missing",
        "ascend firmware": "warning",
        "npu-smi": "warning",
        "CANN toolkit": "missing",
        "ASCEND_HOME_PATH": "warning",
        "ASCEND_TOOLKIT_HOME": "warning",
        "NNAL (ATB)": "optional",
    }
    assert str(rows["CANN toolkit"].problem()) == (
        "MS501 CANN toolkit: not found\n  fix: install Ascend-cann-toolkit for this machine, see docs/ascend.md"
    )


def test_a_shell_that_sourced_nothing_is_told_which_file_to_source(complete):
    root, _ = complete
    rows = found(root, {"PATH": os.defpath})
    source = f"source {root}/usr/local/Ascend/ascend-toolkit/set_env.sh in this shell and in job scripts"
    assert (rows["ASCEND_HOME_PATH"].value, rows["ASCEND_HOME_PATH"].fix) == ("not set", source)
    assert rows["CANN toolkit"].state == "ok"
    nnal = rows["NNAL (ATB)"]
    assert nnal.value == f"installed in {root}/usr/local/Ascend/nnal/atb/latest, but ATB_HOME_PATH is not set"
    assert nnal.fix == f"source {root}/usr/local/Ascend/nnal/atb/set_env.sh in this shell and in job scripts"


def test_variables_that_lead_nowhere_are_told(complete):
    root, environ = complete
    rows = found(root, environ | {"ASCEND_HOME_PATH": "/gone", "ATB_HOME_PATH": "/gone"})
    assert (rows["ASCEND_HOME_PATH"].value, rows["ASCEND_HOME_PATH"].state) == ("/gone does not exist", "warning")
    assert rows["NNAL (ATB)"].value == "ATB_HOME_PATH is /gone, which does not exist"
    assert rows["CANN toolkit"].value.startswith("8.3.RC1")


def test_a_toolkit_without_kernels_is_told(complete):
    root, environ = complete
    (root / CANN / "opp/built-in/op_impl/ai_core/tbe/kernel/ascend910b/add.o").unlink()
    (root / CANN / "opp/built-in/op_impl/ai_core/tbe/kernel/ascend910b").rmdir()
    row = found(root, environ)["CANN kernels"]
    assert (row.value, row.state) == (f"none below {root}/{CANN}/opp", "missing")
    assert row.fix == "install the kernels (ops) package of the toolkit's version for this chip"


def test_the_newer_layout_of_cann_is_found(tmp_path):
    info = {
        "usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info": "version=8.5.0\n",
        "usr/local/Ascend/cann/aarch64-linux/ascend_ops_install.info": "version=8.5.0\n",
    }
    put(tmp_path, info)
    rows = found(tmp_path, {"PATH": os.defpath})
    assert rows["CANN toolkit"].value == f"8.5.0 ({tmp_path}/usr/local/Ascend/cann)"
    assert rows["CANN kernels"].value == "8.5.0"


def test_an_interrupted_installation_is_told(complete):
    root, environ = complete
    (root / CANN / "x86_64-linux" / "ascend_toolkit_install.info").write_bytes(b"\xff\xfe garbage")
    row = found(root, environ)["CANN toolkit"]
    assert (row.value, row.state) == (f"{root}/{CANN} has no ascend_toolkit_install.info", "warning")


def test_a_driver_elsewhere_is_found_where_its_installer_noted_it(tmp_path):
    put(
        tmp_path,
        {
            "dev/davinci0": "",
            "etc/ascend_install.info": "UserName=HwHiAiUser\nDriver_Install_Path_Param=/opt/Ascend\n",
            "opt/Ascend/driver/version.info": "Version=24.1.0\n",
        },
    )
    row = found(tmp_path, {"PATH": os.defpath})["ascend driver"]
    assert row.value == f"24.1.0 ({tmp_path}/opt/Ascend/driver/version.info)"


@pytest.mark.parametrize(
    ("says", "status", "value", "state"),
    [
        (
            "dcmi module initialize failed. ret is -8005",
            1,
            "ends with status 1: dcmi module initialize failed. ret is -8005",
            "missing",
        ),
        ("+------+", 0, "nothing", "ok"),
    ],
)
def test_what_the_tool_of_the_driver_says_is_shown(complete, npu_smi, says, status, value, state):
    root, environ = complete
    row = found(root, environ | {"PATH": npu_smi(says, status)})["npu-smi"]
    assert (row.value, row.state) == (value, state)


def test_a_tool_that_never_answers_does_not_hold_up_the_report(complete, npu_smi, monkeypatch):
    root, environ = complete
    path = npu_smi("x")
    (root / "bin" / "npu-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(ascend, "SECONDS", 0.2)
    row = found(root, environ | {"PATH": path})["npu-smi"]
    assert (row.value, row.state) == (f"{root}/bin/npu-smi does not run: no output within 0.2 seconds", "missing")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Made-up Python packages that this process and the probing one find first."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(**texts):
        for name, text in texts.items():
            put(tmp_path, {f"{name}/__init__.py": text})

    return make


def torch_npu():
    return [(row.subject, row.value, row.state) for row in doctor._npu({"version": "2.9.0+cpu"})]


@pytest.mark.guards(4, processes=True)
def test_a_torch_npu_that_cannot_be_imported_is_a_finding(packages):
    packages(torch="", torch_npu="raise ImportError('libhccl.so: cannot open shared object file')")
    text = "cannot be imported: ImportError: libhccl.so: cannot open shared object file"
    assert torch_npu() == [("torch_npu", text, "warning")]


def test_a_torch_npu_of_another_torch_is_a_finding(packages):
    packages(torch="", torch_npu="__version__ = '2.8.0.post2'")
    assert torch_npu() == [("torch_npu", "2.8.0.post2 was built for another torch than 2.9.0+cpu", "warning")]


@pytest.mark.guards(36, processes=True)
def test_transformer_engine_for_cuda_beside_torch_npu_is_a_finding(packages):
    packages(torch="", torch_npu="__version__ = '2.9.0'", transformer_engine="", transformer_engine_torch="")
    text = "a CUDA build is installed together with torch_npu; Megatron imports it and fails in a search for cuDNN"
    assert torch_npu() == [("torch_npu", "2.9.0", "ok"), ("transformer_engine", text, "warning")]
