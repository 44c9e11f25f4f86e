"""A run that is started again and again reaches its last step: ``mindspeed pretrain --auto-resume``."""

from __future__ import annotations

import random
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

from mindspeed.cli import main
from mindspeed.cli.pretrain import pretrain
from mindspeed.cli.run import run as run_command
from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.training.checkpoints import checkpoint_path, newest_complete
from tests.workbench.training.conftest import TINY, MakeRun, Run, job_of, losses
from tests.workbench.training.torchrun_nodes import Node, agent, free_port

MINDSPEED = str(Path(sys.executable).with_name("mindspeed"))
STEPS = 66


def job(text: str, steps: int) -> list[str]:
    return [*TINY, "--data", text, "--train-iters", str(steps), "--save-interval", "3", "--keep", "3", "--sample-tokens", "0"]


def kill(kind: str, node: Node, other: Node, run: Path, chance: random.Random) -> bool:
    """Kill something of a job; return whether the moment for it had come."""
    if kind == "save" and not saves(run):
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


def saves(run: Path, seconds: float = 0.3) -> bool:
    """Look for a checkpoint that is being written, which takes milliseconds, for a while; return whether there was one."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if list((run / "checkpoints").glob(".step-*.partial")):
            return True
        time.sleep(0.002)
    return False


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
                due = reached + 4
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


@pytest.mark.long
def test_a_run_goes_on_with_other_numbers_of_ranks(tmp_path, text):
    """A signal ends a start after it has saved, with status 75; the next one may have fewer or more ranks."""
    alone, run = tmp_path / "alone", tmp_path / "run"
    words = [*job(text, 60), "--micro-batch-size", "1", "--auto-resume"]  # four ranks share the batch of four
    Run("--nproc", 1, *words, alone).done()
    for ranks, step in ((4, 6), (2, 12)):
        start = Run("--nproc", ranks, *words, run, cold=True)
        start.wait_for_step(run, step)
        start.process.terminate()
        start.done(75)
        assert newest_complete(run) == max(losses(run))
    Run("--nproc", 4, *words, run).done()
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)


def test_the_newest_checkpoint_with_all_its_files_is_continued(make_run: MakeRun) -> None:
    """What a start that was killed has left is neither continued nor in the way."""
    run = make_run(Layer("job file"), steps=(20, 24, 28))
    (checkpoint_path(run, 28) / "metadata.json").unlink()
    (run / "checkpoints" / ".step-00000032.partial").mkdir()
    assert newest_complete(run) == 24
    train = {"run": str(run), "train_iters": 40}
    assert job_of(Layer("command line"), train, resume=str(run), step=24).checkpoint.endswith("step-00000024")
    for step in (20, 24):
        shutil.rmtree(checkpoint_path(run, step))
    assert newest_complete(run) is None


@pytest.mark.parametrize("more", [["--run", "elsewhere"], ["--resume", "elsewhere"]])
def test_the_run_folder_is_named_once(more):
    done = CliRunner().invoke(main, ["pretrain", "--auto-resume", "runs/job", *more])
    assert done.exit_code == 2
    assert "--auto-resume names the run folder; remove --resume and --run" in done.stderr


def test_torchrun_leaves_every_option_alone_or_a_second_spelling_of_it():
    """On Python before 3.12 torchrun refuses an option behind the program that begins like several of its own spellings."""
    theirs = get_args_parser()._option_string_actions
    for command in (pretrain, run_command):
        for option in command.params:
            spellings = [*option.opts, *option.secondary_opts]
            refused = [word for word in spellings if word not in theirs and sum(name.startswith(word) for name in theirs) > 1]
            assert refused != spellings or not spellings, option.name
