"""The training loop: plain Megatron from groups to the last checkpoint. Features reach it through the active plan."""

from __future__ import annotations

import math
import random
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mindspeed.engine.runtime import session
from mindspeed.job.world import World
from mindspeed.megatron import gpt
from mindspeed.megatron.training_hook_wrappers import step_metrics
from mindspeed.problems import Fix, Problem, RunError
from mindspeed.workbench.training import configurations, saving
from mindspeed.workbench.training.batches import Batches, build_datasets, largest, over_ranks, run_schedule
from mindspeed.workbench.training.checkpoints import checkpoint_path, saved_steps, step_of
from mindspeed.workbench.training.config import TrainConfig
from mindspeed.workbench.training.data_source import DataSource
from mindspeed.workbench.training.evaluation import generate, held_out_loss, unigram_entropy
from mindspeed.workbench.training.interruption import StopRequest
from mindspeed.workbench.training.job import Job, write_job
from mindspeed.workbench.training.loss_guard import LIMIT, Action, LossGuard
from mindspeed.workbench.training.reporting import Reporter
from mindspeed.workbench.training.run_folder import hold_folder
from mindspeed.workbench.training.run_page import RESULT
from mindspeed.workbench.training.storage import RemoteCopies

if TYPE_CHECKING:
    from mindspeed.workbench.training.local_saving import LocalSaver


def build_model(world: World, config: TrainConfig) -> list[DistributedDataParallel]:
    """This rank's model chunks, wrapped for their precision and for data parallelism."""
    shape = configurations.of_model(world, config).made()
    grouped = bool(world.num_experts and world.grouped_experts)
    if world.is_set("engine_over_local"):
        spec = get_gpt_layer_with_transformer_engine_spec(world.num_experts or None, grouped)
    else:
        spec = get_gpt_layer_local_spec(world.num_experts or None, grouped, normalization=world.normalization)
    chunks = gpt.build_chunks(shape, world, lambda stage: (spec, None), rotary_base=config.rotary_base)
    return gpt.wrapped(chunks, configurations.of_data_parallelism(world).made())


def build_optimizer(chunks: list[DistributedDataParallel], world: World, config: TrainConfig) -> Any:
    """Megatron's optimizer of these chunks, and what its schedules read from their configuration."""
    shape = chunks[0].config
    optimizer = get_megatron_optimizer(configurations.of_optimizer(world, config).made(), chunks)
    shape.grad_scale_func = optimizer.scale_loss
    gpt.connect(chunks)
    return optimizer


def local_saver(job: Job, data: str) -> LocalSaver:
    """Return what writes the state to the disks of the nodes, whose package is imported only then."""
    from mindspeed.workbench.training.local_saving import LocalSaver

    return LocalSaver(job, data)


def build_scheduler(optimizer: Any, config: TrainConfig) -> OptimizerParamScheduler:
    """The learning rate over optimizer steps. A schedule of the job overrides that of a checkpoint."""
    last = config.decay_iters or config.train_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=min(config.warmup_iters, last - 1),
        lr_decay_steps=last,
        lr_decay_style=config.decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=last,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


REPORT: Final = "report.json"
"""The proof of application in the run folder: what each feature reached."""


def train(job: Job) -> dict[str, Any]:
    """Train the job on the existing process group. Returns the result of the run, equal on every rank."""
    with hold_folder(job.run) if dist.get_rank() == 0 else nullcontext():
        parallel_state.initialize_model_parallel()
        seed_generators(job.config.seed)
        result = Trainer(job, job.source()).run()
        parallel_state.destroy_model_parallel()
    return result


class Trainer:
    """A run on this rank."""

    local: LocalSaver | None = None
    copies: RemoteCopies | None = None

    def __init__(self, job: Job, source: DataSource) -> None:
        self.job, self.config, self.source = job, job.config, source
        world = job.plan.world
        self.seq_length, self.samples_per_step = world.seq_length, world.global_batch_size
        chunks = build_model(world, self.config)
        optimizer = build_optimizer(chunks, world, self.config)
        self.state = saving.TrainerState(chunks, optimizer, build_scheduler(optimizer, self.config))
        if self.config.local_save is not None:
            self.local = local_saver(job, source.identity)
        notes = self._load(job.checkpoint)
        if dist.get_rank() == 0:  # not before the checkpoint is loaded: a run whose resume fails stays as it was
            write_job(job)
            (Path(job.run) / RESULT).unlink(missing_ok=True)
        datasets = build_datasets(source, world.seq_length, self.config.held_out, self.config.seed, Path(job.run) / "index")
        self.train_batches, self.held_out_batches = (
            Batches(dataset, world.micro_batch_size, world.global_batch_size, self.config.seed) for dataset in datasets
        )
        self.saver = saving.Saver(job, source.identity)
        self.guard = LossGuard(self.config, scales_loss=world.dtype == "fp16")
        self.stop = StopRequest()
        self.interrupted = False
        self.initial_loss = math.nan
        self.reporter: Reporter | None = None
        if dist.get_rank() == 0:
            tokens = self.samples_per_step * self.seq_length
            self.reporter = Reporter(Path(job.run), self.state.step, self.config.train_iters, tokens, self.config.log_interval)
            for note in notes:
                self.reporter.note(note)
            if self.config.remote is not None:
                self.copies = RemoteCopies(self.config.remote, self.config.keep, self.reporter.note)
            if (active := session.current()) is not None:
                active.proof.path = Path(job.run) / REPORT
                active.proof.say = self.reporter.note

    def _load(self, checkpoint: str) -> list[str]:
        """Continue from a checkpoint of the run, or from the local one of the nodes where that is newer; collective."""
        self.saved = step_of(Path(checkpoint)) if checkpoint else 0
        if self.local is not None and self.local.newest() > self.saved:
            return [self.local.load(self.state, self.source)]
        return saving.load(replace(self.job, checkpoint=checkpoint), self.state, self.source) if checkpoint else []

    def run(self) -> dict[str, Any]:
        """Train, save and evaluate; after one of `SAVING_SIGNALS` only save."""
        with self.stop.heeding():
            while self.state.step < self.config.train_iters and not self.interrupted:
                self._step()
                self._after_step()
            if self.state.step != self.saved:
                self._save()
            self._finish_saving()
            if self.local is not None:
                self.local.remove()
            if self.copies is not None:
                self.copies.finish()
            result = self._result()
            session.enter(None)
            if self.reporter is not None:
                self.reporter.close(result)
        return result

    def _step(self) -> None:
        state, start = self.state, time.perf_counter()
        local_loss, rate, updated, gradient, action = update(state, self.train_batches, self.guard)
        state.step += 1
        state.samples += self.samples_per_step
        torch.cuda.synchronize()
        seconds, stop = largest(time.perf_counter() - start, self.stop.is_made)
        numbers = step_metrics(state)
        loss, self.interrupted = over_ranks(local_loss), stop > 0
        if action is not None:
            self._reject(action, loss)
            return
        if not math.isfinite(loss) or (updated and not math.isfinite(gradient)):
            self._finish_saving()
            raise self._not_finite(loss)
        if state.step == 1:
            self.initial_loss = loss
        if self.reporter is not None:
            self.reporter.step(state.step, loss, rate, gradient, seconds, numbers)

    def _reject(self, action: Action, loss: float) -> None:
        """Go on after a step that changed no weights: with the next one, or from the newest checkpoint."""
        self._finish_saving()
        step, steps = self.state.step, saved_steps(self.job.run)
        if self.guard.rejected > LIMIT:
            raise self._unusable(
                f"{self.guard.rejected} steps up to step {step} were rejected without a usable one between them"
            )
        if action == "rollback" and not steps and (self.local is None or self.local.newest() < 0):
            raise self._unusable(f"the loss of step {step} is {loss:g}, and there is no checkpoint to return to")
        if action == "rollback":
            samples = self.state.samples
            self.state.scheduler = build_scheduler(self.state.optimizer, self.config)
            self._load(str(checkpoint_path(self.job.run, steps[-1])) if steps else "")
            self.state.samples = samples
        if self.reporter is not None:
            self.reporter.rejected(step, loss, action, after=self.state.step)

    def _after_step(self) -> None:
        step, config = self.state.step, self.config
        with self.reporter.paused() if self.reporter is not None else nullcontext():
            self._finish_saving(wait=False)
            if config.save_interval and step % config.save_interval == 0:
                self._save()
            elif self.local is not None and step % config.local_save_interval == 0:
                with session.around("around_save", step=step):
                    self.local.save(self.state)
            has_time = step < config.train_iters and not self.interrupted
            if config.eval_interval and step % config.eval_interval == 0 and has_time:
                self._evaluate()

    def _save(self) -> None:
        self._finish_saving()
        if self.copies is not None:  # the checkpoint that is being copied may be the next one that is removed
            self.copies.finish()
        with session.around("around_save", step=self.state.step):
            self.saver.save(self.state)
        self.saved = self.state.step
        self._agree_to_stop()
        if not self.saver.is_writing:
            self._note_saved()

    def _finish_saving(self, wait: bool = True) -> None:
        """Complete the checkpoint that is being written; without ``wait`` only if all of it is written."""
        if self.saver.finish(wait):
            self._note_saved()

    def _note_saved(self) -> None:
        if self.reporter is not None:
            self.reporter.note(f"step {self.saved}/{self.config.train_iters}  saved")
        if self.copies is not None:
            self.copies.add(checkpoint_path(self.job.run, self.saved))

    def _agree_to_stop(self) -> bool:
        """Return whether a signal has asked any rank to stop; collective."""
        (stop,) = largest(self.stop.is_made)
        self.interrupted = self.interrupted or stop > 0
        return self.interrupted

    def _evaluate(self) -> float | None:
        """Return the held-out loss, or None when a signal ends the evaluation."""
        loss = held_out_loss(self.state.chunks, self.held_out_batches, self.config.eval_iters, self._agree_to_stop)
        if self.reporter is not None and loss is not None:
            self.reporter.held_out(self.state.step, loss)
        return loss

    def _result(self) -> dict[str, Any]:
        loss = None if self.interrupted else self._evaluate()
        return {
            "initial_loss": None if math.isnan(self.initial_loss) else self.initial_loss,
            "heldout_loss": loss,
            "unigram_entropy": unigram_entropy(self.source, self.config.held_out),
            "world_size": dist.get_world_size(),
            "digest": self.job.plan.digest,
            "run": self.job.run,
            "step": self.state.step,
            "interrupted": self.interrupted,
            "sample": "" if self.interrupted or not self.config.sample_tokens else self._sample(),
        }

    def _sample(self) -> str:
        tokenizer, config = self.source.tokenizer, self.config
        prompt = tokenizer.encode(config.prompt.encode()).tolist() or [max(tokenizer.eod, 0)]
        how = (config.sample_tokens, self.seq_length, config.top_k, tokenizer.vocab_size)
        return tokenizer.decode(prompt + generate(self.state.chunks, prompt, *how, self._agree_to_stop))

    def _not_finite(self, loss: float) -> RunError:
        if math.isfinite(loss):
            return self._unusable(f"a gradient is not finite in step {self.state.step}")
        return self._unusable(f"the loss of step {self.state.step} is {loss}")

    def _unusable(self, text: str) -> RunError:
        steps = saved_steps(self.job.run)
        again = f"--resume {self.job.run} returns to step {steps[-1]}; try" if steps else "try"
        fix = Fix.advise(f"{again} a lower --lr or a longer --warmup-iters")
        return RunError([Problem("MS606", text, where=self.job.run, fix=fix)])


class Update(NamedTuple):
    """Hold the loss of this rank, the learning rate, whether the parameters were updated, and the norm of their gradient.

    ``action`` is what becomes of a step that a `LossGuard` rejects.
    """

    local_loss: torch.Tensor | None
    rate: float
    updated: bool
    gradient: float
    action: Action | None = None


def update(state: saving.TrainerState, batches: Batches, guard: LossGuard | None = None) -> Update:
    """Train with the next batch: the forward and backward passes of the schedule, and the optimizer's step."""
    with session.around("around_train_step", state=state):
        for chunk in state.chunks:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        local_loss = run_schedule(state.chunks, batches, state.samples)
        rate = state.optimizer.param_groups[0]["lr"]
        if guard is not None and guard.is_active and (action := guard.judge(state.step + 1, local_loss, state.chunks)):
            return Update(local_loss, rate, False, math.nan, action)
        updated, gradient, _ = state.optimizer.step()
        if updated:
            state.scheduler.step(increment=1)
    return Update(local_loss, rate, updated, gradient)


def seed_generators(seed: int) -> None:
    """Seed every generator as Megatron's trainer does: stages differ, replicas agree."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
