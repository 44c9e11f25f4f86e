"""Megatron-LM's own script, started again and again by torchrun and a scheduler, reaches its last step through ``--load``."""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.megatron_lm.checkout import ITERATION, LLAMA, ROOT
from tests.workbench.training.torchrun_nodes import Node, agent, free_port

STEPS = 24


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", range(2))
def test_kills_do_not_keep_the_script_from_its_last_step(checkout, tmp_path, seed):
    folder, chance = checkout.folder / "checkpoints", random.Random(seed)
    flags = [*LLAMA, "--train-iters", str(STEPS), "--save-interval", "2", "--ckpt-format", "torch_dist"]
    undisturbed = checkout.adapted(2, *flags, "--save", str(checkout.folder / "undisturbed")).ended_well()
    script = [str(checkout.script_with_line()), *checkout.flags, *flags, "--save", str(folder), "--load", str(folder)]
    search = os.pathsep.join([str(checkout.root), str(ROOT)])
    variables = {"PYTHONPATH": search, "MINDSPEED_PLATFORM": "cpu", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = agent(free_port(), script)
    nodes = [Node(tmp_path / f"node{number}.log", command, **variables) for number in range(2)]
    kinds = ["worker", "agent", "node"]
    chance.shuffle(kinds)
    due, end = 4, time.monotonic() + 2000
    try:
        while sum(node.look() for node in nodes) < len(nodes):
            assert time.monotonic() < end, kinds
            tracker = folder / "latest_checkpointed_iteration.txt"
            reached = int(tracker.read_text() or 0) if tracker.exists() else 0
            if kinds and reached >= due:
                node, kind = chance.choice(nodes), kinds.pop()
                if kind == "worker":
                    for rank in node.ranks():
                        rank.kill()
                elif kind == "agent":
                    node.agent.kill()
                else:
                    node.lose()
                due = reached + 4
            time.sleep(0.3)
    finally:
        printed = "".join(node.end() for node in nodes)
    assert kinds == [], printed[-3000:]
    expected = dict(undisturbed.steps)
    steps = {int(number): (loss, norm) for number, loss, norm in ITERATION.findall(printed)}
    assert {number: norm for number, (_, norm) in steps.items()} == {number: norm for number, (_, norm) in expected.items()}
    for number, (loss, _) in steps.items():
        alone = float(expected[number][0])
        if float(loss) != alone:  # Megatron-LM's second line after a start has the mean of both steps
            assert float(loss) == pytest.approx((alone + float(expected[number - 1][0])) / 2, abs=2e-6)
