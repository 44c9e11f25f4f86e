"""A choice that is left to mindspeed, as the command line shows it; features of other distributions take part."""

import json

import pytest

LAPTOP = ("--platform", "cpu", "--megatron", "0.16.1", "--optimization-level", "2", "--cp", "2", "--world-size", "2")
SHAPE = (
    "--num-attention-heads",
    "8",
    "--num-query-groups",
    "8",
    "--hidden-size",
    "64",
    "--seq-length",
    "64",
    "--dtype",
    "bf16",
)
AUTO = ("--set", "context-parallel.algorithm=auto")
CHOSEN = (
    "context-parallel.algorithm is auto, so ulysses-attention is chosen, which costs least: a rank sends 16,384 bytes "
    "per layer and sequence, forward and backward"
)


@pytest.fixture
def run(mindspeed):
    return lambda *arguments: mindspeed("features", *arguments)


def test_check_and_plan_show_choice_reason_and_alternatives(run):
    done = run("check", *LAPTOP, *SHAPE, *AUTO)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == f"choice       context-parallel: {CHOSEN}"
    words = " ".join(run("plan", *LAPTOP, *SHAPE, *AUTO).stdout.split())
    assert f"choices context-parallel: {CHOSEN} context-parallel: ring-attention: a rank sends " in words


def test_json_carries_the_choice(run):
    plan = json.loads(run("plan", *LAPTOP, *SHAPE, *AUTO, "--json").stdout)["plan"]
    rows = [row for row in plan["rows"] if row["kind"] == "choice"]
    assert rows[0] == {"kind": "choice", "feature": "context-parallel", "text": CHOSEN}
    assert json.loads(run("check", *LAPTOP, *SHAPE, *AUTO, "--json").stdout)["plan"] == plan
    (problem,) = json.loads(run("check", *LAPTOP, *AUTO, "--json").stdout)["problems"]
    assert (problem["code"], problem["features"]) == ("MS341", ["context-parallel"])


def test_explain_says_why_the_chosen_feature_is_on(run):
    done = run("explain", *LAPTOP, *SHAPE, *AUTO, "ulysses-attention")
    assert "  context-parallel.algorithm is auto (command line), and it costs least: a rank sends 16,384 bytes" in done.stdout
    assert CHOSEN in run("explain", *LAPTOP, *SHAPE, *AUTO, "context-parallel").stdout


def test_a_feature_of_another_distribution_can_be_named_and_takes_part(run, install):
    install("acme", {"acme-ring": 'Requires("context-parallel"),'}, slots='("context-parallel",)')
    done = run("check", *LAPTOP, *SHAPE, "--set", "context-parallel.algorithm=acme-ring")
    assert (done.exit_code, "acme-ring" in done.stdout.partition(";")[0]) == (0, True)
    done = run("check", *LAPTOP, *SHAPE, *AUTO)
    assert "choice       context-parallel: acme-ring: cannot, it declares no cost\n" in done.stdout
