"""Collectives of the cpu platform on two ranks: one launch, with poison and log, whose results the tests read."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.warm_processes import warm_python

SCRIPT = Path(__file__).with_name("collective_checks.py")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("log") / "collectives.{rank}"


@pytest.fixture(scope="module")
def results(log):
    settings = ["--set", "device-emulation.poison=true", "--set", f"device-emulation.collective_log={log}"]
    command = [*warm_python(), "-m", "mindspeed", "run", "--platform", "cpu", "--nproc", "2", *settings, "--", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def rows(results, log):
    """What rank 0 logged."""
    return [json.loads(line) for line in Path(str(log).format(rank=0)).read_text().splitlines()]


def on_both(*values):
    return list(values) if len(values) == 2 else [values[0], values[0]]


GATHERED, EXCHANGED = [[1], [2, 2, 2]], ([[10], [10]], [[1, 1]])
COUNTS = {
    "all_reduce TENSOR_MODEL_PARALLEL_GROUP": [2, 32],
    "all_gather TENSOR_MODEL_PARALLEL_GROUP": [1, 32],
    "reduce_scatter default": [1, 16],
}


def refused(kind, shape="(2, 2)", strides="(4, 1)"):
    what = f"{kind} got shape {shape} with strides {strides}"
    return f"Tensors must be contiguous: {what}. fix: pass tensor.contiguous(), and copy a result back"


REFUSED_BOTH_WAYS = ["all_gather_into_tensor", "gather", "reduce_scatter_tensor", "all_to_all_single", "all_to_all"]
EXPECTED = {
    "backend_is_gloo": on_both(["gloo", "gloo"]),
    "sums_are_poison_until_the_wait": on_both([True, True, [3, 3], [2, 2]]),
    "a_gather_in_place_keeps_its_own_share": on_both([[1, 2], [1, 1, 2, 2]], [[2, 2], [1, 1, 2, 2]]),
    "a_scatter_into_its_own_input_is_poison_until_the_wait": on_both([True, [0, 2]], [True, [4, 6]]),
    "a_broadcast_is_poison_where_it_arrives": on_both([True, [1, 1]], [False, [1, 1]]),
    "coalesced_gathers_are_poison_until_their_one_wait": on_both([[True, True], [[1, 2], [2, 4]]]),
    "batched_messages_are_poison_until_the_wait": on_both([True, [1, 1]], [True, [0, 0]]),
    "synchronizing_the_device_waits_for_everything": on_both([2, 2]),
    "a_future_brings_the_output": on_both([2, 2]),
    "a_missing_wait_poisons_the_loss": on_both(["finite", "poison"]),
    "uneven_parts_are_gathered_and_scattered": on_both([[GATHERED, [2]]] * 2, [[GATHERED, [4, 4, 4]]] * 2),
    "uneven_parts_are_exchanged": on_both(
        [[[[0]], EXCHANGED[0]], [[], EXCHANGED[0]]] * 2, [[EXCHANGED[1], [[11, 11]] * 2], [EXCHANGED[1], []]] * 2
    ),
    "a_gather_asks_for_sizes_and_not_for_shapes": on_both([[1] * 8 + [2] * 8, [2] * 4 + [4] * 4]),
    "parts_are_scaled_before_they_are_summed": on_both(
        [[1.5, 1.5], [0, 1], [0, 1, 2, 3], [1]], [[1.5, 1.5], [2, 3], [0, 1, 2, 3], [3]]
    ),
    "views_are_scattered_by_their_elements": on_both(
        [[[0], [2]], [[0, 1], [2, 3]], [5, 5], [[]], 7], [[[1], [3]], [[0, 2], [1, 3]], [6, 6], [[]], 8]
    ),
    "lists_of_views_are_filled_and_read": on_both([[[1, 2, 1, 2]] * 2, [1, 5]], [[[1, 2, 1, 2]] * 2, [3, 7]]),
    "other_views_are_refused": on_both(
        {
            "broadcast": [refused("broadcast"), refused("broadcast", "(4,)", "(0,)")],
            "all_reduce": [
                refused("all_reduce"),
                refused("all_reduce", "(4,)", "(0,)"),
                refused("all_reduce", "(3, 2)", "(1, 3)"),
            ],
            **{kind: [refused(kind)] for kind in ("reduce", "all_gather", "scatter", "reduce_scatter")},
            **{kind: [refused(kind)] * 2 for kind in REFUSED_BOTH_WAYS},
        }
    ),
    "dense_tensors_of_any_shape_are_reduced": on_both([[0, 2], 3, [1, 3, 5, 7, 9, 11, 13, 15]]),
    "a_message_outlives_the_storage_of_its_tensor": on_both(True),
    "traffic_is_counted": on_both([COUNTS, 16]),
    "a_spawned_process_gets_the_platform": on_both([True, [1], "cpu"], None),
}


@pytest.mark.budget(15)
@pytest.mark.parametrize("check", EXPECTED)
def test_collectives_do_as_on_cuda(results, check):
    """The names of the checks are sentences; of traffic, calls and bytes are counted by kind and group in nested blocks."""
    assert results[check] == EXPECTED[check]


def test_the_log_shows_which_use_came_before_its_wait(rows):
    launches = [row for row in rows if row["event"] == "launch"][-2:]
    assert [(row["kind"], row["group"], row["bytes"]) for row in launches] == [
        ("all_reduce", "default", 12),
        ("all_reduce", "default", 20),
    ]
    early, waited = ([row for row in rows if row["id"] == launch["id"]] for launch in launches)
    assert [row["event"] for row in early] == ["launch", "use", "wait"]
    assert (early[1]["op"], early[1]["waited"]) == ("aten.sum.default", False)
    assert [row["event"] for row in waited] == ["launch", "wait", "use"]
    assert (waited[2]["op"], waited[2]["waited"]) == ("aten.mul.Tensor", True)
    assert waited[1]["blocked"] >= 0
