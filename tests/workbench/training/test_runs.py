"""Real runs of ``mindspeed pretrain``, and what becomes of them when something happens."""

import fcntl
import json
import math
import os
import pty
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

from mindspeed.workbench.training.checkpoints import checkpoint_path, partial_path, saved_steps
from tests.workbench.training.conftest import TINY, Run, log, losses

pytestmark = pytest.mark.long

SPLIT = ("--nproc", 2, "--tp", 2, "--features", "sequence-parallel,distributed-optimizer")


@pytest.mark.guards(42, processes=True)
def test_a_run_at_tp2_goes_on_at_pp2_as_if_it_had_not_been_interrupted(tmp_path, text):
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    steps = ("--train-iters", 10, "--save-interval", 5)
    done = Run(*TINY, *SPLIT, *steps, "--data", text, "--run", whole, "--json").done()
    (line,) = done.out.splitlines()
    result = json.loads(line)
    assert list(result) == ["initial_loss", "heldout_loss", "unigram_entropy", "world_size", "digest", "run"]
    assert result["world_size"] == 2
    assert result["digest"] == json.loads((whole / "plan.json").read_text())["digest"]
    assert result["initial_loss"] == pytest.approx(math.log(320), abs=0.2)
    assert result["heldout_loss"] < result["initial_loss"] - 0.5
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((whole / "tensorboard").iterdir())

    shutil.rmtree(checkpoint_path(whole, 10))
    done = Run("--resume", whole, "--run", rest, "--nproc", 2, "--tp", 1, "--pp", 2).done()
    assert "sequence-parallel was skipped: it has no effect in this layout" in done.out
    assert "the layout differs from the checkpoint's, so dropout draws different random numbers from this step on" in done.err
    assert sorted(losses(rest)) == [6, 7, 8, 9, 10]
    for step, loss in losses(rest).items():
        assert loss == pytest.approx(losses(whole)[step], rel=1e-5)


def stopped_by(number, run, *more):
    """A run that a signal stopped, which saved and said how to go on; and its last step."""
    stopped = Run("--resume", run, *more, "--train-iters", 1_000_000, cold=True)
    stopped.wait_for_step(run, 4)
    stopped.process.send_signal(number)
    stopped.done()
    step = saved_steps(run)[-1]
    assert step == max(losses(run)) >= 4
    assert f"stopped after step {step}; continue with:\n" in stopped.out
    return stopped, step


def test_a_run_that_ctrl_c_stops_saves_and_says_how_to_go_on(run):
    stopped, step = stopped_by(signal.SIGINT, run)
    program, verb, *arguments = shlex.split(stopped.out.splitlines()[-1])
    assert (Path(program).name, verb) == ("mindspeed", "pretrain")
    Run(*arguments, "--train-iters", step + 2).done()
    assert max(losses(run)) == step + 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_what_a_scheduler_sends_before_it_takes_the_node_saves_too(run, number):
    stopped_by(number, run, "--nproc", 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_during_a_save_ends_the_run_with_that_checkpoint(run, number):
    """torchrun signals the process group of each rank, and so the helpers of the save."""
    stopped = Run("--resume", run, "--train-iters", 1_000_000, "--save-interval", 2, cold=True)
    partial = partial_path(checkpoint_path(run, 4))
    while not partial.exists():
        assert stopped.process.poll() is None, stopped.process.communicate()
        time.sleep(0.002)
    stopped.process.send_signal(number)
    stopped.done()
    assert "stopped after step 4; continue with:\n" in stopped.out
    assert saved_steps(run) == [2, 4]
    assert not partial.exists()


def test_a_run_ends_two_seconds_after_the_save_that_a_signal_requests(run):
    stopped = Run("--resume", run, "--nproc", 2, "--train-iters", 1_000_000, cold=True)
    stopped.wait_for_step(run, 20)
    stopped.process.send_signal(signal.SIGTERM)
    while saved_steps(run) == [2]:
        assert stopped.process.poll() is None, stopped.process.communicate()
        time.sleep(0.002)
    saved = time.monotonic()
    stopped.done()
    assert time.monotonic() - saved < 2


def test_a_run_whose_terminal_closes_saves_and_ends(run):
    master, terminal = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)

    def control_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a test run under nohup ignores it, and its children with it
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    control = {"start_new_session": True, "preexec_fn": control_terminal}
    stopped = Run("--resume", run, "--nproc", 2, "--train-iters", 1_000_000, cold=True, **streams, **control)
    os.close(terminal)
    while max(losses(run), default=0) < 4:
        assert stopped.process.poll() is None
        if select.select([master], [], [], 0.1)[0]:
            os.read(master, 65536)
    os.close(master)
    assert stopped.process.wait(timeout=60) == 0
    assert saved_steps(run)[-1] == max(losses(run)) >= 4


def test_ranks_end_with_a_launcher_that_is_killed(run):
    lost = Run("--resume", run, "--nproc", 2, "--train-iters", 1_000_000, cold=True)
    lost.wait_for_step(run, 3)
    ranks = [lost.rank(0), lost.rank(1)]
    lost.process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert not alive
    Run("--resume", run, "--train-iters", 3).done()


def test_a_second_job_in_a_run_folder_is_refused_before_it_starts_anything(run):
    first = Run("--resume", run, "--train-iters", 1_000_000, cold=True)
    first.wait_for_step(run, 3)
    second = Run("--resume", run, "--train-iters", 4).done(status=1)
    assert second.err == (
        f"MS608 another job is running in {run}\n"
        f"  where: {run}\n"
        "  fix: wait until that job has ended, or give another --run FOLDER\n"
    )
    first.process.send_signal(signal.SIGINT)
    first.done()


def test_a_resume_that_cannot_load_leaves_the_run_as_it_was(run):
    (checkpoint_path(run, 2) / "common.pt").write_bytes(bytes((checkpoint_path(run, 2) / "common.pt").stat().st_size))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    Run("--resume", run, "--train-iters", 4, "--dropout", 0.1).done(status=1)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"} == before


def test_a_rank_that_is_killed_ends_the_others_and_is_named(run):
    lost = Run("--resume", run, "--nproc", 2, "--train-iters", 1_000_000, cold=True)
    lost.wait_for_step(run, 3)
    ranks = [lost.rank(0), lost.rank(1)]
    start = time.monotonic()
    ranks[1].kill()
    lost.done(status=1)
    assert time.monotonic() - start < 5
    assert lost.err.endswith(
        "MS604 rank 1 was killed by SIGKILL; the other ranks were stopped\n"
        "  fix: if it was not killed on purpose, the machine may be out of memory; see its kernel log\n"
    )
    assert not any(psutil.pid_exists(rank.pid) and rank.is_running() for rank in ranks)
    Run("--resume", run, "--train-iters", 3).done()
    assert saved_steps(run) == [2, 3]


def test_a_full_disk_leaves_the_checkpoint_before(run):
    limit = 300_000
    small = {"cold": True, "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))}
    full = Run("--resume", run, "--train-iters", 4, **small)
    full.done(status=1)
    path = checkpoint_path(run, 4)
    told = full.err[full.err.index("MS603") :].splitlines()
    assert told[0] == "MS603 the checkpoint of step 4 cannot be saved; the checkpoint of step 2 is unchanged"
    assert told[1].startswith("  because: writing failed: ")
    assert told[2].startswith(f"  because: the disk of {run} has ")
    assert told[3:] == [f"  where: {path}", f"  fix: free some space, then mindspeed pretrain --resume {run}"]
    assert saved_steps(run) == [2]
    assert not partial_path(path).exists()
    Run("--resume", run, "--train-iters", 4).done()
    assert saved_steps(run) == [2, 4]


def test_a_disk_that_is_full_while_the_index_of_the_data_is_written_is_one_problem(tmp_path, text):
    limit, run = 200_000, tmp_path / "run"
    small = {"cold": True, "preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))}
    full = Run(*TINY, "--seq-length", 4, "--data", text, "--run", run, **small)
    full.done(status=1)
    assert "MS603 " in full.err
    assert full.err.endswith(f"  where: {run}\n  fix: free some space, then start again\n")
    assert "Traceback" not in full.err


def test_a_platform_without_a_device_is_one_problem(tmp_path, text):
    done = Run(*TINY, "--data", text, "--run", tmp_path / "run", "--platform", "cuda").done(status=3)
    assert done.err.count("MS501 the platform is cuda, but torch finds no such device\n") == 1
    assert "Traceback" not in done.err


def test_a_loss_that_is_not_finite_ends_the_run(run):
    schedule = ("--train-iters", 20, "--decay-iters", 20, "--lr", "1e30", "--warmup-iters", 0)
    wild = Run("--resume", run, *schedule).done(status=1)
    assert wild.err.splitlines()[-3].startswith("MS606 ")
    assert wild.err.endswith(
        f"  where: {run}\n  fix: --resume {run} returns to step 2; try a lower --lr or a longer --warmup-iters\n"
    )
    assert saved_steps(run) == [2]
    assert all(math.isfinite(loss) for loss in losses(run).values())


def test_a_checkpoint_with_other_bytes_than_were_saved_is_not_loaded(run):
    """torch loads a tensor whose bytes have changed without a word."""
    path = checkpoint_path(run, 2)
    part = sorted(path.glob("*.distcp"))[0]
    content = bytearray(part.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    part.write_bytes(content)
    refused = Run("--resume", run, "--train-iters", 4).done(status=1)
    problem = refused.err[refused.err.index("MS602") :].splitlines()
    assert problem[0] == f"MS602 {path} is damaged"
    assert all(line.startswith(f"  because: {part.name}: ") for line in problem[1:-2])
    assert problem[-1] == "  fix: copy it again from its source, or start a new run"


@pytest.mark.parametrize("layout", ["", "--nproc 2 --features distributed-optimizer"])
def test_a_checkpoint_of_steps_that_were_all_skipped_is_loaded(tmp_path, text, layout):
    """fp16 with weights so large that gradients overflow."""
    run, large = tmp_path / "run", ("--dtype", "fp16", "--init-std", 1)
    Run(*TINY, *large, *layout.split(), "--data", text, "--run", run, "--train-iters", 2).done()
    assert [row["gradient_norm"] for row in log(run) if "loss" in row] == [None, None]
    Run("--resume", run, *layout.split(), "--train-iters", 8).done()
    assert [row["gradient_norm"] for row in log(run) if "loss" in row][-1] is not None


@pytest.mark.parametrize(
    "layout",
    [
        "--style gpt2",
        "--style gpt2 --pp 2 --nproc 2",
        "--dtype bf16 --nproc 2",
        "--dtype fp16 --tp 2 --nproc 2",
        "--pp 2 --vpp 2 --nproc 2 --global-batch-size 8",
        "--tp 2 --pp 2 --nproc 4 --features sequence-parallel",
        "--num-experts 4 --ep 2 --nproc 2",
        "--num-experts 4 --style gpt2",
        "--nproc 2 --features distributed-optimizer,async-ddp,async-param-gather",
        "--nproc 2 --tp 2 --features recompute --dropout 0.1",
    ],
)
def test_every_layout_and_style_trains_and_goes_on(tmp_path, text, layout):
    run = tmp_path / "run"
    Run(*TINY, *layout.split(), "--data", text, "--run", run, "--train-iters", 6, "--save-interval", 3).done()
    shutil.rmtree(checkpoint_path(run, 6))
    before = losses(run)
    nproc = layout.split("--nproc ")[1].split()[0] if "--nproc" in layout else "1"
    Run("--resume", run, "--nproc", nproc).done()
    after = [row["loss"] for row in log(run) if "loss" in row][6:]
    assert after == pytest.approx([before[4], before[5], before[6]], rel=1e-5)
    assert before[6] < before[1] - 0.3


def test_experts_train_with_a_capacity_and_their_load_is_in_the_log(tmp_path, text):
    features = ("--features", "moe-alltoall-overlap,moe-load-report")
    experts = ("--num-experts", 4, "--ep", 2, "--nproc", 2, "--expert-capacity-factor", 1)
    Run(*TINY, *experts, *features, "--data", text, "--run", tmp_path, "--train-iters", 4).done()
    rows = [row for row in log(tmp_path) if "loss" in row]
    assert rows[-1]["loss"] < rows[0]["loss"]
    for row in rows:
        load = row["moe-load-report"]
        assert load.keys() == {"max_over_mean", "mean_max_over_mean", "idle", "dropped"}
        assert 1 <= load["mean_max_over_mean"] <= load["max_over_mean"] <= 2
        assert 0 < load["dropped"] < 1
    assert json.loads((tmp_path / "report.json").read_text())["problems"] == []


@pytest.mark.parametrize("manager", ["torchrun", "slurm"])
def test_a_process_of_a_job_joins_it(tmp_path, text, manager):
    mindspeed = str(Path(sys.executable).with_name("mindspeed"))
    command = [mindspeed, "pretrain", *TINY, "--data", text, "--run", str(tmp_path / "run"), "--train-iters", "4", "--json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment |= {"OMP_NUM_THREADS": "1"}
    if manager == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", "--"]
        ranks = [subprocess.Popen([*torchrun, *command], env=environment, stdout=subprocess.PIPE, text=True)]
    else:
        environment |= {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost"}
        ranks = [
            subprocess.Popen(
                command,
                env={**environment, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in "01"
        ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    (line,) = "".join(outputs).splitlines()
    assert json.loads(line)["world_size"] == 2
    assert max(losses(tmp_path / "run")) == 4


def test_uniform_random_text_is_not_predicted(tmp_path):
    import random

    from mindspeed.workbench.training.corpus import prepare

    (tmp_path / "noise").write_bytes(bytes(random.Random(0).choices(range(97, 123), k=500_000)))
    prepare([str(tmp_path / "noise")], str(tmp_path / "data"))
    done = Run(*TINY, "--data", tmp_path / "data", "--run", tmp_path / "run", "--train-iters", 300, "--json").done()
    assert json.loads(done.out)["heldout_loss"] > math.log(26) - 0.05
