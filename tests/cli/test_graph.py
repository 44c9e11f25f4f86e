"""``features graph``: how the features of a job, or all of them, relate."""

import json
import re

from tests.cli.conftest import LAPTOP


def test_all_features_are_in_the_graph_when_no_job_is_given(mindspeed, install):
    install("acme", {"acme-clip": 'Requires("recompute", reason="it builds on it"),'}, slots='("clipping",)')
    lines = mindspeed("features", "graph", *LAPTOP).stdout.splitlines()
    start = lines.index("acme-clip")
    assert lines[start + 1 : start + 3] == ["  requires recompute, because it builds on it", "  holds slot clipping"]
    assert "sequence-parallel" in lines


def test_a_job_has_its_own_features_in_activation_order(mindspeed):
    done = mindspeed("features", "graph", *LAPTOP, "sequence-parallel", "--tp", 2, "--world-size", 2, "--optimization-level", 0)
    assert done.stdout.splitlines() == [
        "tensor-parallel",
        (
            "  needs one of sequence-parallel (with some settings), because Megatron trains a MoE model with tp > 1 only "
            "if sequence parallelism is on"
        ),
        "sequence-parallel",
        "  requires tensor-parallel, because sequence-parallel splits the sequence over tensor-parallel ranks",
    ]


def test_dot_draws_requirements_conflicts_order_and_slots(mindspeed, install):
    install(
        "acme",
        {
            "acme-a": "",
            "acme-b": 'Conflicts("clipping"), After("acme-a"), Requires("acme-a"),',
        },
        slots='("clipping",) if False else ()',
    )
    install("bolt", {"bolt-clip": ""}, slots='("clipping",)')
    done = mindspeed("features", "graph", *LAPTOP, "--format", "dot")
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("digraph features {", "}")
    for line in (
        '  "acme-b" -> "slot clipping" [color=red, dir=none, constraint=false, label="conflict"];',
        '  "acme-b" -> "acme-a" [style=dotted, constraint=false];',
        '  "acme-b" -> "acme-a";',
        '  "bolt-clip" -> "slot clipping" [style=dashed, dir=none];',
        '  "slot clipping" [shape=ellipse, style=dashed];',
    ):
        assert line in lines
    drawn = re.compile(r'  (rankdir=.*|"[^"]+"( -> "[^"]+")?( \[[^\]]+\])?);')
    assert [line for line in lines[1:-1] if not drawn.fullmatch(line) and "rankdir" not in line] == []


def test_json_names_features_relations_and_holders_of_slots(mindspeed):
    data = json.loads(mindspeed("features", "graph", *LAPTOP, "--json").stdout)
    assert list(data) == ["features", "relations", "slots"]
    policies = ["adaptive-recompute", "recompute", "recompute-in-advance", "recompute-in-bubble"]
    assert data["slots"]["recompute-policy"] == policies
    assert {
        "source": "distributed-optimizer",
        "kind": "requires",
        "target": "data-parallel",
        "reason": "distributed-optimizer shards the optimizer state over data-parallel replicas",
        "conditional": False,
    } in data["relations"]
