"""``mindspeed docs`` and ``mindspeed doctor --matrix``."""

import json
import sys

import pytest

from mindspeed._version import __version__
from mindspeed.cli.docs import CHECKOUT


def test_a_feature_of_another_package_has_a_page(mindspeed, install):
    install("acme", {"acme-clip": 'Requires("recompute", reason="it clips what is recomputed"),'}, slots='("clipping",)')
    done = mindspeed("docs", "acme-clip")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == (
        "# acme-clip\n\n"
        "<!-- made by `make docs` from the declaration in acme_features; do not edit -->\n\n"
        "Made up.\n\n"
        "|  |  |\n|---|---|\n"
        "| category | tool |\n"
        "| level | 2: on request |\n"
        "| stability | prototype |\n"
        "| numerics | exact: bit for bit the results of the baseline |\n"
        "| platforms | npu, cuda, cpu |\n"
        "| megatron-core | `>=0.14,<0.20`, all that mindspeed supports |\n"
        "| slots | clipping |\n"
        "| in checkpoints | adds nothing |\n"
        "| provided by | acme |\n\n"
        "## Settings\n\nNone.\n\n"
        "## Constraints\n\n- Requires recompute, because it clips what is recomputed.\n\n"
        "## What it changes in Megatron\n\nNo patch and no argument of its own.\n"
    )


def test_json_holds_the_pages_by_name(mindspeed):
    pages = json.loads(mindspeed("docs", "rms-norm", "swiglu", "--json").stdout)["pages"]
    assert list(pages) == ["rms-norm", "swiglu"]
    assert pages["swiglu"].startswith("# swiglu\n")


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
        "MS101 feature swiglu cannot be loaded: TypeError: mindspeed.features.swiglu.feature defines 0"
    )
    assert not (tmp_path / "docs").exists()


def test_a_name_that_is_no_feature_and_no_name_at_all_are_usage_errors(mindspeed):
    done = mindspeed("docs", "zzz")
    assert done.exit_code == 2
    assert "Error: there is no feature zzz; mindspeed features list shows every name" in done.stderr
    done = mindspeed("docs")
    assert done.exit_code == 2
    assert "Error: name features to print their pages, or give --write FOLDER for all pages" in done.stderr


def test_the_support_matrix_is_printed_and_says_what_nobody_ran(mindspeed):
    done = mindspeed("doctor", "--matrix")
    assert done.exit_code == 0
    rows = {tuple(line.split()[:2]): line for line in done.stdout.splitlines()}
    assert rows["mindspeed", __version__].split()[2] == "tested"
    assert "not tested" in rows["hardware", "Ascend"]
    assert done.stdout.endswith("not tested: nobody has run it; it is meant to work, or is listed because users ask\n")


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


def test_outside_a_checkout_the_verb_says_where_pages_are_made(mindspeed, monkeypatch, tmp_path):
    monkeypatch.setattr("mindspeed.cli.docs.CHECKOUT", tmp_path)
    done = mindspeed("docs", "swiglu")
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr == (
        "MS501 pages are made by tools/docs, which a checkout of mindspeed has and an installed package has not\n"
        "  fix: run mindspeed docs of a checkout: pip install -e . there\n"
    )


def test_the_working_directory_does_not_matter(mindspeed, monkeypatch, tmp_path):
    root = str(CHECKOUT)
    monkeypatch.setattr("sys.path", [place for place in sys.path if place not in (root, "")])
    for name in [name for name in sys.modules if name.partition(".")[0] == "tools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    assert mindspeed("docs", "swiglu").stdout.startswith("# swiglu\n")
