"""``mindspeed docs`` and ``mindspeed doctor --matrix``."""

import json
import os
import subprocess
import sys

import pytest

from mindspeed._version import __version__
from mindspeed.cli.docs import PAGES
from tests.conftest import ROOT


def test_a_feature_of_another_package_has_a_page(mindspeed, install):
    install("acme", {"acme-clip": 'Requires("recompute", reason="it clips what is recomputed"),'}, slots='("clipping",)')
    done = mindspeed("docs", "acme-clip")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == (
        "# acme-clip\n\n"
        "<!-- made from the declaration in acme_features -->\n\n"
        "Made up.\n\n"
        "*Category tool, level 2, exact, prototype.*\n\n"
        "## Usage\n\n"
        "In a job file, or as `--features acme-clip`:\n\n```yaml\nfeatures: [acme-clip]\n```\n\n"
        "## Settings\n\nNone.\n\n"
        "## Works with, needs and refuses\n\n- Requires recompute, because it clips what is recomputed.\n\n"
        "## Numerics\n\nExact: bit for bit the results of the baseline.\n\n"
        "## For developers\n\n"
        "|  |  |\n|---|---|\n"
        "| category | tool |\n"
        "| level | 2: on request |\n"
        "| stability | prototype |\n"
        "| numerics | exact |\n"
        "| platforms | npu, cuda, cpu |\n"
        "| megatron-core | `>=0.14,<0.21`, all that mindspeed supports |\n"
        "| slots | clipping |\n"
        "| in checkpoints | adds nothing |\n"
        "| provided by | acme |\n\n"
        "### What it changes in Megatron\n\nNo patch and no argument of its own.\n"
    )


@pytest.mark.parametrize("path", ["docs/layout.md", "layout.md", "https://forge.example/mindspeed/docs/layout.md"])
def test_the_path_of_a_page_is_its_name(mindspeed, path):
    assert mindspeed("docs", path).stdout == mindspeed("docs", "layout").stdout
    done = mindspeed("docs", path.replace("layout", "layuot"))
    assert done.stderr.endswith("Error: no guide or feature is named layuot; did you mean layout?\n")


def test_json_holds_the_pages_by_name(mindspeed):
    pages = json.loads(mindspeed("docs", "rms-norm", "swiglu", "--json").stdout)["pages"]
    assert list(pages) == ["rms-norm", "swiglu"]
    assert pages["swiglu"].startswith("# swiglu\n")


@pytest.mark.long
@pytest.mark.budget(8)
def test_the_whole_reference_is_written_with_or_without_third_parties(mindspeed, install, tmp_path):
    install("acme", {"acme-clip": ""})
    for options, expected in (((), True), (("--built-in",), False)):
        done = mindspeed("docs", "--write", tmp_path / "docs", *options)
        assert (done.exit_code, done.output) == (0, "")
        assert (tmp_path / "docs" / "features" / "acme-clip.md").exists() == expected
        assert (tmp_path / "docs" / "errors.md").exists()


def test_nothing_is_written_while_a_built_in_feature_does_not_load(mindspeed, monkeypatch, tmp_path):
    from mindspeed.features.swiglu import feature

    monkeypatch.delattr(feature, "Swiglu")
    done = mindspeed("docs", "--write", tmp_path / "docs")
    assert done.exit_code == 1
    assert done.stderr.startswith(
        "MS101 feature swiglu cannot be loaded: TypeError: mindspeed.features.swiglu.feature must define exactly one feature, "
        "but defines 0"
    )
    assert not (tmp_path / "docs").exists()


def test_a_name_that_is_neither_guide_nor_feature_is_a_usage_error_with_similar_names(mindspeed, tmp_path):
    done = mindspeed("docs", "zzz")
    assert done.exit_code == 2
    assert (
        "Error: no guide or feature is named zzz; mindspeed docs lists every guide, mindspeed features list every feature\n"
        in done.stderr
    )
    done = mindspeed("docs", "troubleshoting")
    assert done.exit_code == 2
    assert "Error: no guide or feature is named troubleshoting; did you mean troubleshooting?\n" in done.stderr
    done = mindspeed("docs", "swiglu", "--write", tmp_path)
    assert done.exit_code == 2
    assert "Error: give names of pages to print them, or --write FOLDER to write all pages\n" in done.stderr


def test_without_a_name_every_guide_is_listed_with_its_title(mindspeed):
    done = mindspeed("docs")
    assert done.exit_code == 0
    rows = [line.split(None, 1) for line in done.stdout.splitlines()[:-2]]
    names = [name for name, _ in rows]
    assert names == sorted(names)
    assert {"cli", "hooks", *(page.stem for page in PAGES.glob("*.md"))} <= set(names)
    assert ["errors", "Error codes"] in rows
    assert done.stdout.endswith("\nmindspeed docs PAGE prints one; PAGE may also be the name of a feature.\n")


def test_a_guide_is_printed_as_it_is_in_the_checkout(mindspeed):
    assert mindspeed("docs", "troubleshooting").stdout == (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")


def test_the_support_matrix_is_printed_and_says_what_nobody_ran(mindspeed):
    done = mindspeed("doctor", "--matrix")
    assert done.exit_code == 0
    rows = {tuple(line.split()[:2]): line for line in done.stdout.splitlines()}
    assert rows["mindspeed", __version__].split()[2] == "tested"
    assert "not tested" in rows["hardware", "Ascend"]
    assert done.stdout.endswith(
        "not tested: it was never run; it is expected to work, or is listed because users ask about it\n"
    )


def test_the_support_matrix_is_there_for_programs(mindspeed):
    matrix = json.loads(mindspeed("doctor", "--matrix", "--json").stdout)
    assert matrix.keys() == {"cells", "combinations", "states"}
    assert {cell["component"] for cell in matrix["cells"]} == {
        "mindspeed",
        "megatron-core",
        "torch",
        "torch_npu",
        "CANN",
        "Python",
        "hardware",
    }
    assert {row["state"] for row in [*matrix["cells"], *matrix["combinations"]]} <= matrix["states"].keys()
    assert all(row["state"] == "not tested" for row in matrix["combinations"] if row["platform"] in ("npu", "cuda"))


WITHOUT = (
    "import sys; sys.modules |= dict.fromkeys(('tools', 'torch', 'numpy', 'megatron')); from mindspeed.cli import main; main()"
)
"""The command in an environment that has neither a checkout's tools nor what trains."""


@pytest.mark.parametrize("page", ["acme-clip", "swiglu", "drift"])
def test_a_page_is_made_from_what_is_installed(install, tmp_path, page):
    install("acme", {"acme-clip": ""})
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", WITHOUT, "docs", page]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("# ")


def test_the_page_of_a_broken_feature_is_its_problem(mindspeed, install):
    install("acme", {"acme-clip": 'Requires("nowhere"),'})
    done = mindspeed("docs", "acme-clip")
    assert done.exit_code == 1
    assert done.stderr.startswith("MS103 feature acme-clip declares Requires on nowhere, which no installed feature provides")
