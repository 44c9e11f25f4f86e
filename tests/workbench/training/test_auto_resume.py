"""A run that is started again and again reaches its last step: ``mindspeed pretrain --auto-resume``."""

from __future__ import annotations

import random
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from mindspeed.workbench.training.checkpoints import newest_complete
from tests.workbench.training.conftest import TINY, Run, losses
from tests.workbench.training.torchrun_nodes import Node, agent, free_port

MINDSPEED = str(Path(sys.executable).with_name("mindspeed"))
STEPS = 66


def job(text: str, steps: int) -> list[str]:
    return [*TINY, "--data", text, "--train-iters", str(steps), "--save-interval", "3", "--keep", "3", "--sample-tokens", "0"]


def kill(kind: str, node: Node, other: Node, run: Path, chance: random.Random) -> bool:
    """Kill something of a job; return whether the moment for it had come."""
    if kind == "save" and not list((run / "checkpoints").glob(".step-*.partial")):
        return False
    if kind == "agent":
        node.agent.kill()
    elif kind == "node":
        node.lose()
    else:
        ranks = chance.choice([node, other]).ranks()
        for rank in ranks[:1]:
            with suppress(psutil.Error):
                rank.kill()
        return bool(ranks)
    return True


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", range(5))
def test_ten_kills_at_random_places_do_not_keep_a_run_from_its_end(tmp_path, text, seed):
    undisturbed, run, chance = tmp_path / "undisturbed", tmp_path / "run", random.Random(seed)
    Run("--nproc", 2, *job(text, STEPS), "--run", undisturbed).done()
    kinds = ["worker", "agent", "node", "save", "rendezvous"] * 2
    chance.shuffle(kinds)
    command = agent(free_port(), [MINDSPEED, "pretrain", *job(text, STEPS), "--auto-resume", str(run)])
    nodes = [Node(tmp_path / f"node{number}.log", command) for number in range(2)]
    newest, due, killed, end = 0, 4, list[str](), time.monotonic() + 2400
    try:
        while sum(node.look() for node in nodes) < len(nodes):
            assert time.monotonic() < end, f"killed {killed}; at step {max(losses(run), default=0)}"
            complete = newest_complete(run) or 0
            assert complete >= newest, "a complete checkpoint was lost"
            newest, reached = complete, max(losses(run), default=0)
            if kinds and reached >= due and kill(kinds[-1], *chance.sample(nodes, 2), run, chance):
                killed.append(f"{kinds.pop()} at step {reached}")
                due = reached + 5
                if kinds and kinds[-1] == "rendezvous":  # while the ranks that are started now look for each other
                    due = 0
                    time.sleep(chance.uniform(2, 6))
            time.sleep(0.3)
    finally:
        printed = [node.end() for node in nodes]
    (tmp_path / "killed.txt").write_text("\n".join(killed))
    assert len(killed) == 10, (killed, printed[0][-3000:])
    assert losses(run) == losses(undisturbed)
    assert newest_complete(run) == STEPS
