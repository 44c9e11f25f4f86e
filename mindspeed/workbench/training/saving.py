"""Saving and loading the state of a run through Megatron's distributed checkpoints, which any layout can load."""

from __future__ import annotations

import random
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial as partial_function
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from mindspeed import registry
from mindspeed.engine.planning.checkpoint_state import CheckpointManifest, read_record, record_of, unreadable_format
from mindspeed.engine.runtime import session
from mindspeed.engine.runtime.uncaught import lost_peer
from mindspeed.job.world import PARALLEL_SIZES
from mindspeed.megatron.hook_wrappers import group_sizes
from mindspeed.megatron.model_class import point_at_gpt, point_at_hybrid
from mindspeed.megatron.training_hook_wrappers import LoopState
from mindspeed.problems import Problem, RunError, advice
from mindspeed.workbench.training.checkpoints import (
    REQUEST,
    Manifest,
    checkpoint_path,
    damaged,
    damages,
    file_sizes,
    partial_path,
    read_manifest,
    remove_old,
    saved_steps,
)
from mindspeed.workbench.training.data_source import DataSource
from mindspeed.workbench.training.evaluation import gathered
from mindspeed.workbench.training.interruption import SAVING_SIGNALS, children_without
from mindspeed.workbench.training.job import Job
from mindspeed.workbench.training.resume import comparable


@dataclass(slots=True)
class TrainerState(LoopState):
    """Everything that a run continues from; hooks of features get it as ``state``."""

    samples: int = 0


class Saver:
    """Write the checkpoints of a run, under a temporary name until they are complete.

    With the setting ``async_save`` training goes on in the meantime: processes write copies of the tensors, and one checkpoint
    is written at a time. ``data`` identifies the data of the samples. Its methods are collective. They raise RunError with
    MS603 when a rank cannot write; what was saved before is then untouched. A rank whose error the others do not see ends, and
    takes the job with it.
    """

    def __init__(self, job: Job, data: str) -> None:
        self._job, self._data = job, data
        self._queue = AsyncCallsQueue()
        self._step = 0

    @property
    def is_writing(self) -> bool:
        """Return whether a checkpoint is not complete yet."""
        return bool(self._queue.get_num_unfinalized_calls())

    def save(self, state: TrainerState) -> None:
        """Save the state; with ``async_save`` return as soon as it is copied, else when the checkpoint is complete.

        The checkpoint before must be complete.
        """
        self._step = state.step
        partial = partial_path(checkpoint_path(self._job.run, state.step))
        with self._named_failures():
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            dist.barrier()
            start_adam(state.optimizer)
            with gathered(state.chunks), children_without(SAVING_SIGNALS):
                if self._job.config.async_save:
                    request = dist_checkpointing.save(state_dict(state), str(partial), async_sharded_save=True)
                    request.add_finalize_fn(partial_function(self._complete, state.step, state.samples))
                    self._queue.schedule_async_request(request)
                    return
                dist_checkpointing.save(state_dict(state), str(partial))
            self._complete(state.step, state.samples)
            dist.barrier()

    def finish(self, wait: bool = True) -> bool:
        """Complete the checkpoint that is being written; return whether it is complete now. Without ``wait`` only look."""
        if not self.is_writing:
            return False
        with self._named_failures():
            return bool(self._queue.maybe_finalize_async_calls(blocking=wait))

    def _complete(self, step: int, samples: int) -> None:
        """Describe what was written, and give it its name."""
        if dist.get_rank() > 0:
            return
        job, path = self._job, checkpoint_path(self._job.run, step)
        partial = partial_path(path)
        registry.write_plan(job.plan, partial / "plan.json")
        record_of(job.plan, registry.feature_classes(job.plan), registry.content_of(job.plan)).write(partial)
        (partial / REQUEST).write_text(job.request, encoding="utf-8")
        layout, files = _layout(), file_sizes(partial)
        Manifest(step, samples, job.model, job.optimizer, self._data, layout, job.plan.digest, files).write(partial)
        shutil.rmtree(path, ignore_errors=True)  # an incomplete one
        partial.rename(path)
        remove_old(job.run, job.config.keep)

    @contextmanager
    def _named_failures(self) -> Iterator[None]:
        try:
            yield
        except CheckpointException as error:
            reason = [str(_cause(error)).removeprefix("Worker failure: ")]
            dist.broadcast_object_list(reason, src=0)  # every rank has the exception
            raise _not_saved(self._job, self._step, reason[0]) from error
        except (OSError, RuntimeError) as error:
            if (lost := lost_peer(error)) is not None:
                raise RunError([lost]) from error
            raise _not_saved(self._job, self._step, str(error)) from error


def load(job: Job, state: TrainerState, source: DataSource) -> list[str]:
    """Continue from the job's checkpoint; collective. Returns sentences about what could not be restored."""
    checkpoint = Path(job.checkpoint)
    manifest, record = read_manifest(checkpoint), read_record(checkpoint)
    same_layout = manifest.layout == _layout()
    notes = []
    megatron, sharded = job.plan.environment.get("megatron"), job.optimizer == "distributed"
    if (problem := unreadable_format(checkpoint, megatron, shards_optimizer=sharded)) is not None:
        raise RunError([problem])
    _require_undamaged(checkpoint)
    try:
        wanted = state_dict(state, is_loading=True, with_random=same_layout, without_data=_new_features(job, record))
        if other := comparable(manifest.model, job.model)[-1]:
            sharded_state = {key: wanted[key] for key in (*(key for key, _ in _model_keys(state)), "optimizer")}
            if "layers" in job.model:
                point_at_gpt(sharded_state, job.model["layers"])
            else:
                point_at_hybrid(sharded_state, str(manifest.model["layers"]))
            notes.append(other)
        loaded = dist_checkpointing.load(wanted, str(checkpoint))
    except (CheckpointException, OSError, EOFError, RuntimeError, ValueError, KeyError) as error:
        cause = _cause(error)
        text = f"{checkpoint} cannot be loaded: {type(cause).__name__}: {''.join(str(cause).splitlines()[:1])}"
        fix = (
            "restore the missing or damaged file, or resume from another checkpoint; if no file is damaged, compare the job "
            f"with the output of mindspeed checkpoint inspect {checkpoint}"
        )
        raise RunError([Problem("MS602", text, where=str(checkpoint), fix=advice(fix))]) from error
    state.step, state.samples = manifest.step, manifest.samples
    put_state(job, state, loaded)
    if not same_layout:
        tensor_parallel.model_parallel_cuda_manual_seed(job.config.seed + manifest.step, force_reset_rng=True)
        notes.append("the layout differs from the checkpoint's, so dropout draws different random numbers from this step on")
    if not source.is_that_of(manifest.data):
        state.samples = 0
        notes.append("the data differs from the checkpoint's, so it is read from the beginning")
    return notes


def put_state(job: Job, state: TrainerState, loaded: dict[str, Any]) -> None:
    """Put what was loaded into model, optimizer, schedule, generators and features."""
    for key, chunk in _model_keys(state):
        chunk.load_state_dict(loaded[key])
    _complete_steps(loaded["optimizer"])
    state.optimizer.load_state_dict(loaded["optimizer"])
    for group in state.optimizer.param_groups:  # a rate that is given anew wins over the checkpoint's
        group["max_lr"], group["min_lr"] = job.config.lr, job.config.min_lr
    state.scheduler.load_state_dict(loaded["scheduler"])
    if "random" in loaded:
        _set_random_state(loaded["random"])
    for feature, extra in loaded.get("extra", {}).items():
        session.tell("load_extra", feature, state=state, data=extra)


def _new_features(job: Job, record: CheckpointManifest | None) -> tuple[str, ...]:
    """Features of the job of which the checkpoint has no data, since they were not active then."""
    saved = {feature.name for feature in record.features} if record is not None else set(job.plan.names)
    return tuple(name for name in job.plan.names if name not in saved)


def state_dict(
    state: TrainerState, is_loading: bool = False, with_random: bool = True, without_data: Collection[str] = ()
) -> dict[str, Any]:
    """Return what a checkpoint contains, or, if one ``is_loading``, what is read of it."""
    metadata = {
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    content: dict[str, Any] = {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in _model_keys(state)}
    content["optimizer"] = state.optimizer.sharded_state_dict(dict(content), is_loading=is_loading, metadata=metadata)
    content["scheduler"] = state.scheduler.state_dict()
    if with_random:
        content["random"] = _random_state()
    if extra := {name: data for name, data in session.call("save_extra", state=state) if name not in without_data}:
        content["extra"] = extra
    return content


def _model_keys(state: TrainerState) -> list[tuple[str, Any]]:
    chunks = unwrap_model(state.chunks)
    return [("model" if len(chunks) == 1 else f"model{index}", chunk) for index, chunk in enumerate(chunks)]


def _layout() -> dict[str, int]:
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    sizes = group_sizes() | {"world_size": dist.get_world_size(), "vpp": chunks}
    return {name: sizes[name] for name in ("world_size", *PARALLEL_SIZES)}


def _require_undamaged(checkpoint: Path) -> None:
    """Read every byte before any is loaded, as torch takes a tensor with other bytes for what was saved; collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts: list[Any] = [None] * ranks
    dist.all_gather_object(parts, list(damages(checkpoint, rank, ranks)))
    if reasons := list(dict.fromkeys(reason for part in parts for reason in part)):
        raise RunError([damaged(checkpoint, reasons)])


def start_adam(optimizer: Any) -> None:
    """Give moments of zero, at step 0, to an Adam that has not stepped yet; a checkpoint must hold what loading expects."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        adam = part.optimizer
        if not isinstance(adam, (torch.optim.Adam, torch.optim.AdamW)):
            continue
        if not adam.state:
            part.init_state_fn(adam, part.config)
        if not any("step" in values for values in adam.state.values()):
            for values in adam.state.values():
                values["step"] = torch.tensor(0.0)


def _random_state() -> ShardedObject:
    """This rank's generators; only the same rank of the same layout can go on with them."""
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("random", states, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def _set_random_state(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])


def _complete_steps(saved: dict[Any, Any]) -> None:
    """Put the step of an Adam that had not stepped into its saved state, as Megatron saves no step of zero."""
    moments = saved.get("state", {})
    if "common_step" not in moments:
        for values in moments.values():
            values.setdefault("step", torch.tensor(0.0))
    for key, part in saved.items():
        if key == "optimizer" or isinstance(key, int):
            _complete_steps(part)


def _cause(error: BaseException) -> BaseException:
    """The first failure that a CheckpointException collects, else the error itself."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return next((failure for failure, *_ in failures if isinstance(failure, BaseException)), error)


def _not_saved(job: Job, step: int, reason: str) -> RunError:
    """MS603, after what was written of the checkpoint is removed, which may be the space that others need."""
    path = checkpoint_path(job.run, step)
    shutil.rmtree(partial_path(path), ignore_errors=True)
    steps = saved_steps(job.run)
    before = f"the checkpoint of step {steps[-1]} is unchanged" if steps else "no earlier checkpoint exists"
    fix = f"free some space, then mindspeed pretrain --resume {job.run}" if steps else "free some space, then start again"
    free = shutil.disk_usage(job.run).free // 2**20
    chain = (f"writing failed: {reason.splitlines()[0] if reason else 'unknown'}", f"the disk of {job.run} has {free} MiB left")
    text = f"the checkpoint of step {step} cannot be saved; {before}"
    return RunError([Problem("MS603", text, chain=chain, where=str(path), fix=advice(fix))])
