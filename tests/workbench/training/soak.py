"""Kills and signals at random moments: ``python -m tests.workbench.training.soak FOLDER --kills 40 --signals 40 --minutes 9``.

Each feature set has one run that nothing disturbs. Other runs of the same job are ended again and again, by SIGKILL of a
rank, of the launcher or of all of them, or by a signal that saves, and resumed. Every step that they log, also those that are
trained twice, has the loss and the gradient norm of the undisturbed run, and the last checkpoint its weights, to the last bit.
What has been done is in ``FOLDER/faults.jsonl``, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, Final

import psutil

from mindspeed.workbench.training.checkpoints import checkpoint_path, saved_steps

SETS: Final = {
    "dense": (1, "rms-norm,swiglu,rotary-embedding,flash-attention,matmul-add,swap-optimizer"),
    "tensor": (2, "sequence-parallel,distributed-optimizer,tflops", "--tp=2"),
    "pipeline": (
        2,
        "nano-pipe,recompute",
        "--pp=2",
        "--set=recompute.granularity=full",
        "--set=recompute.method=uniform",
        "--set=recompute.num_layers=1",
    ),
    "experts": (2, "expert-parallel,moe-alltoall-dispatcher,moe-load-report", "--ep=2", "--num-experts=4"),
    "context": (2, "ring-attention,async-ddp,distributed-optimizer", "--cp=2"),
}
"""Processes, features and options of each set; all are deterministic, with dropout."""
TINY: Final = (
    *("--num-layers=2", "--hidden-size=32", "--num-attention-heads=4", "--seq-length=32", "--global-batch-size=4"),
    *(
        "--micro-batch-size=1",
        "--lr=0.01",
        "--warmup-iters=1",
        "--log-interval=1",
        "--dropout=0.1",
        "--eval-iters=1",
        "--sample-tokens=1",
    ),
)
SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
VICTIMS: Final = ("rank", "launcher", "all")
WAIT: Final = 240.0
MARK: Final = "SOAK_RUN"
"""The variable that every process of a run inherits, whatever its parent and its session."""


class Disturbed:
    """A job of one feature set below a folder."""

    def __init__(self, name: str, folder: Path, data: str, steps: int) -> None:
        self.name, self.folder, self.steps = name, folder / name, steps
        nproc, features, *options = SETS[name]
        self.nproc = int(nproc)
        self.arguments = [*TINY, "--features", f"deterministic,{features}", *options, "--data", data, "--save-interval=7"]
        self.arguments += ["--train-iters", str(steps), "--nproc", str(nproc), "--keep", "3"]

    def start(self, run: Path) -> subprocess.Popen[str]:
        """Start the run in a folder, or resume it there."""
        resume = bool(run.exists() and saved_steps(run))
        if run.exists() and not resume:
            shutil.rmtree(run)
        more = ["--resume", str(run), "--nproc", str(self.nproc)] if resume else [*self.arguments, "--run", str(run)]
        command = [str(Path(sys.executable).with_name("mindspeed")), "pretrain", *more]
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_", "SLURM_"))}
        variables |= {"OMP_NUM_THREADS": "1", MARK: str(run)}
        out = (run.parent / f"{run.name}.out").open("a", encoding="utf-8")
        return subprocess.Popen(
            command,
            env=variables,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            restore_signals=True,
        )

    @property
    def reference(self) -> Path:
        """The run that nothing disturbs, trained on the first call."""
        run = self.folder / "whole"
        if not (run / "result.json").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            if run.exists():
                shutil.rmtree(run)
            ended = self.start(run).wait(timeout=600)
            assert ended == 0, f"{self.name}: the undisturbed run ended with {ended}; see {run}.out"
        return run

    def disturb(self, run: Path, fault: str, choose: random.Random) -> dict[str, Any]:
        """Start or resume a run, end it at a random moment, and say what was left. Raises AssertionError for what was lost.

        The run may have reached its end before: then no fault is in the result.
        """
        assert self.reference.exists()
        before = saved_steps(run)[-1] if run.exists() and saved_steps(run) else 0
        logged = len(rows(run)) if before else 0
        process = self.start(run)
        moment = "start" if choose.random() < 0.15 else "training"
        if moment == "start":
            time.sleep(choose.uniform(0, 6))
        else:
            wait_for_steps(process, run, logged + min(choose.randint(1, 12), self.steps - before))
            time.sleep(choose.uniform(0, 0.15))
        victim = choose.choice(VICTIMS) if fault == "kill" else choose.choice(SIGNALS).name
        seen = last_step(run)
        saved = saved_steps(run)[-1] if run.exists() and saved_steps(run) else 0
        begin = time.monotonic()
        struck = process.poll() is None and strike(process, victim, choose)
        status = process.wait(timeout=WAIT)
        wait_for_processes(run)
        if not struck or (fault == "kill" and status == 0):
            assert status == 0, f"{self.name}: the run ended with {status}; see {run}.out"
            return {"set": self.name, "step": last_step(run), "ended": saved_steps(run)[-1] == self.steps}
        seconds = time.monotonic() - begin
        left = saved_steps(run)[-1] if run.exists() and saved_steps(run) else 0
        assert left >= saved, f"{self.name}: the checkpoint of step {saved} is gone after {victim}; step {left} is left"
        has_ended = left == self.steps
        if fault == "signal" and moment == "training" and not has_ended:
            assert status == 0, f"{self.name}: exit status {status} after {victim}"
            assert left == last_step(run) >= seen, (
                f"{self.name}: step {last_step(run)} was trained, {left} saved after {victim}"
            )
        facts = {"set": self.name, "fault": fault, "victim": victim, "moment": moment, "step": seen, "left": left}
        return facts | {"status": status, "seconds": round(seconds, 2), "ended": has_ended}

    def finish(self, run: Path) -> dict[str, Any]:
        """Resume a run to its end, and compare it with the undisturbed one. Raises AssertionError where they differ."""
        if not (saved_steps(run) and saved_steps(run)[-1] == self.steps):
            ended = self.start(run).wait(timeout=600)
            assert ended == 0, f"{self.name}: the resumed run ended with {ended}; see {run}.out"
        expected = {row["step"]: row for row in rows(self.reference)}
        compared = [(row["step"], key) for row in rows(run) for key in ("loss", "gradient_norm")]
        wrong = [
            (row["step"], key)
            for row in rows(run)
            for key in ("loss", "gradient_norm")
            if row[key] != expected[row["step"]][key]
        ]
        assert not wrong, f"{self.name}: {len(wrong)} of {len(compared)} values differ, first {wrong[0]}"
        assert {row["step"] for row in rows(run)} == set(expected), f"{self.name}: steps are missing in the log"
        tensors = same_weights(checkpoint_path(self.reference, self.steps), checkpoint_path(run, self.steps))
        return {"set": self.name, "finished": run.name, "values": len(compared), "tensors": tensors}


def strike(process: subprocess.Popen[str], victim: str, choose: random.Random) -> bool:
    """End a job, or ask it to end. Returns whether it was still there."""
    try:
        if victim not in VICTIMS:
            psutil.Process(process.pid).send_signal(signal.Signals[victim])
            return True
        ranks = workers(process.pid)
        targets = {"rank": [choose.choice(ranks)] if ranks else [], "launcher": [], "all": ranks}[victim]
        if victim in ("launcher", "all") or not targets:
            targets = [psutil.Process(process.pid), *targets]
    except psutil.NoSuchProcess:
        return False
    for target in targets:
        try:
            target.kill()
        except psutil.NoSuchProcess:
            continue
    return True


def workers(launcher: int) -> list[psutil.Process]:
    """The ranks of a job."""
    ranks = []
    for child in psutil.Process(launcher).children(recursive=True):
        try:
            ranks += [child] if "mindspeed.workbench.training.worker" in child.cmdline() else []
        except psutil.NoSuchProcess:
            continue
    return ranks


def wait_for_processes(run: Path) -> None:
    """Return when no process of a run is left: neither a rank nor what a rank has started."""
    end = time.monotonic() + 30
    while left := [process for process in psutil.process_iter() if is_of(process, run)]:
        assert time.monotonic() < end, f"processes outlive their run: {[process.cmdline() for process in left]}"
        time.sleep(0.05)


def is_of(process: psutil.Process, run: Path) -> bool:
    try:
        return process.environ().get(MARK) == str(run) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def wait_for_steps(process: subprocess.Popen[str], run: Path, count: int) -> None:
    """Return when a run has logged so many steps, those counted that it had logged before it was resumed."""
    end = time.monotonic() + WAIT
    while len(rows(run)) < count and process.poll() is None:
        assert time.monotonic() < end, "the run does not get on"
        time.sleep(0.03)


def rows(run: Path) -> list[dict[str, Any]]:
    """Complete rows of steps in the log of a run."""
    path = run / "log.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [row for line in lines if line.endswith("\n") and "loss" in (row := json.loads(line))]


def last_step(run: Path) -> int:
    """The step that was logged last; a resumed run logs again what it trains twice."""
    return next((int(row["step"]) for row in reversed(rows(run))), 0)


def same_weights(one: Path, other: Path) -> int:
    """Compare every tensor of two checkpoints, bit for bit; return their number."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    kept = [_load_state_dict_from_keys(checkpoint_id=str(folder)) for folder in (one, other)]
    first, second = (dict(leaves(state)) for state in kept)
    assert first
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} differs"
    return len(first)


def leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, f"{name}.{key}")


class Record:
    """What has been done, a line each, also by earlier calls."""

    def __init__(self, folder: Path) -> None:
        self._file, self._lock = folder / "faults.jsonl", Lock()
        self.rows = [json.loads(line) for line in self._file.read_text().splitlines()] if self._file.exists() else []

    def add(self, row: dict[str, Any]) -> None:
        with self._lock, self._file.open("a", encoding="utf-8") as file:
            self.rows.append(row)
            file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)

    def of(self, name: str, key: str) -> list[dict[str, Any]]:
        """The rows of a feature set that have a key."""
        return [row for row in self.rows if row["set"] == name and key in row]


def soak(folder: Path, data: str, faults: Mapping[str, int], steps: int, minutes: float, at_once: int = 1) -> bool:
    """Disturb runs of each set until every fault has been, or the time is over. Returns whether all is done.

    ``faults`` has the number of kills and of signals, which are shared out over the sets.
    """
    end, record, names = time.monotonic() + 60 * minutes, Record(folder), list(SETS)
    shares = {name: Counter[str]() for name in names}
    for fault, count in faults.items():
        for number in range(count):
            shares[names[number % len(names)]][fault] += 1

    def work(name: str) -> bool:
        job = Disturbed(name, folder, data, steps)
        left = list((shares[name] - Counter(row["fault"] for row in record.of(name, "fault"))).elements())
        random.Random(f"{name} {len(left)}").shuffle(left)
        while left:
            if time.monotonic() > end:
                return False
            chain = job.folder / f"run{len(record.of(name, 'finished'))}"
            number = len(record.of(name, "run"))
            row = job.disturb(chain, left[-1], random.Random(f"{name} {number}"))
            left = left[: len(left) - ("fault" in row)]
            record.add(row | {"run": chain.name})
            if row["ended"]:
                record.add(job.finish(chain))
        open_chains = {row["run"] for row in record.of(name, "run")} - {row["finished"] for row in record.of(name, "finished")}
        if open_chains and time.monotonic() > end:
            return False
        for chain in open_chains:
            record.add(job.finish(job.folder / chain))
        return True

    with ThreadPoolExecutor(at_once) as pool:
        return all(list(pool.map(work, [name for name in names if shares[name]])))


def summary(folder: Path) -> str:
    """Faults, what was compared, and how long the ends took."""
    done = [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]
    faults = [row for row in done if "fault" in row]
    kinds = Counter((row["fault"], row["victim"]) for row in faults)
    lines = [f"{count:3d} {fault} {victim}" for (fault, victim), count in sorted(kinds.items())]
    slow = {fault: max((row["seconds"] for row in faults if row["fault"] == fault), default=0) for fault in ("kill", "signal")}
    runs = [row for row in done if "finished" in row]
    lines.append(
        f"{len(faults)} faults; {len(runs)} runs compared in {sum(row['values'] for row in runs)} losses and norms and"
    )
    lines.append(f"{sum(row['tensors'] for row in runs)} tensors, all equal")
    lines.append(f"longest end after a kill {slow['kill']} s, after a signal {slow['signal']} s")
    return "\n".join(lines)


def prepare_text(folder: Path) -> str:
    """Prepare words in random order as data."""
    from mindspeed.workbench.training.corpus import prepare

    prefix = folder / "words"
    if not prefix.with_suffix(".idx").exists():
        folder.mkdir(parents=True, exist_ok=True)
        words = random.Random(0).choices(("many", "few", "ranks", "models", "train", "learn", "split", "and", "of"), k=40_000)
        (folder / "words.txt").write_text(" ".join(words))
        prepare([str(folder / "words.txt")], str(prefix))
    return str(prefix)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--signals", type=int, default=40)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--at-once", type=int, default=4)
    given = parser.parse_args()
    folder = given.folder.resolve()
    faults = {"kill": given.kills, "signal": given.signals}
    all_done = soak(folder, prepare_text(folder), faults, given.steps, given.minutes, given.at_once)
    print(summary(folder))
    sys.exit(0 if all_done else 75)


if __name__ == "__main__":
    main()
