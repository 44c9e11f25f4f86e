"""A worker process of the pool: activate a plan, form groups, call a function, undo, send the result. Then the next job."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from mindspeed.engine.runtime import parent_process
from mindspeed.problems import Fix, MindSpeedError, Problem
from mindspeed.workbench.verification.job import Answer, WorkerCall
from mindspeed.workbench.verification.scratch_folder import scratch_folder

PATIENCE: Final = timedelta(seconds=60)
"""Seconds that a collective waits for a rank that does not come."""
MOST_THREADS: Final = 8
"""Threads that a worker may have between jobs: those of autograd and of torch's own pools stay."""
ENDING: Final = 0.5
"""Seconds that the thread of a destroyed process group may take to end."""
_TASKS: Final = Path("/proc/self/task")


def serve(connection: Connection[Answer, WorkerCall], log: Path) -> None:
    """Do jobs until the broker closes the connection, as the leader of a process group, with the output in ``log``."""
    parent_process.end_with(os.getppid())
    os.setpgid(0, 0)  # with the processes that a job starts, to end them all
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        start = time.process_time()
        outcome = _outcome(job)
        connection.send(Answer(outcome, time.process_time() - start, threads(), leftover()))


_DEADLOCK: Final = "MS619"


def threads() -> int:
    """Threads of this process, also those that Python did not start; 0 where the system does not tell."""
    return len(list(_TASKS.iterdir())) if _TASKS.exists() else 0


def leftover() -> str:
    """Describe the first that there is: torch's dispatch modes, arguments of Megatron-LM's training loop, which it reads once,
    threads of process groups, more threads than `MOST_THREADS`."""
    if (torch := sys.modules.get("torch")) is not None and (modes := torch._C._len_torch_dispatch_stack()):
        return f"{modes} dispatch modes"
    if (training := sys.modules.get("megatron.training.global_vars")) is not None and training._GLOBAL_ARGS is not None:
        return "arguments of megatron.training"
    names = _thread_names()
    end = time.monotonic() + ENDING
    while (loops := sum(name.startswith("gloo_") for name in names)) and time.monotonic() < end:
        time.sleep(0.01)
        names = _thread_names()
    if loops:
        return f"{loops} process groups"
    return f"{len(names)} threads" if len(names) > MOST_THREADS else ""


def _thread_names() -> list[str]:
    """Return the names of this process's threads; of one that ends meanwhile there is none."""
    names = []
    for task in _TASKS.iterdir() if _TASKS.exists() else ():
        with suppress(OSError):
            names.append((task / "comm").read_text())
    return names


def _outcome(job: WorkerCall) -> bytes | Problem:
    try:
        with patch.dict(os.environ):  # Megatron sets variables, by which ranks with other jobs would differ in the next one
            return _call(job)
    except MindSpeedError as error:  # a feature or the framework refuses here what the plan accepted
        first, *others = error.problems
        return replace(first, chain=(f"on verification rank {job.rank}", *first.chain, *map(str, others)))
    except Exception as error:  # whatever a feature raises belongs to the caller
        text = f"verification rank {job.rank} failed: {type(error).__name__}: {error}"
        return Problem(
            "MS607",
            text,
            chain=tuple(traceback.format_exc().splitlines()[-6:]),
            fix=Fix.advise("read the lines above; they end in the feature or code that failed"),
        )


def _call(job: WorkerCall) -> bytes:
    """Call a function in a gloo group of its own, or under its plan in Megatron's groups, and undo the plan."""
    from mindspeed import registry
    from mindspeed.engine.planning.plan import plan_from_json

    if job.plan is None:
        try:
            with _process_group(job, "gloo"):
                return _pickled_result(job)
        finally:
            gc.collect()
    plan = plan_from_json(job.plan)
    os.environ.update(registry.process_variables(plan))
    registry.activate(plan)
    try:
        with _megatron_groups(job):
            return _pickled_result(job)
    finally:
        with scratch_folder() if job.alone else nullcontext():  # where a profiler writes what it has
            registry.deactivate()


def _pickled_result(job: WorkerCall) -> bytes:
    function = _function(job.file, job.name)  # with the platform in place, for its file may import Megatron
    return pickle.dumps(function(*pickle.loads(job.arguments)))


def _function(file: str, name: str) -> Callable[..., Any]:
    """A top-level function of a file, which is run anew: as a test file has no name to import it by, and may change."""
    spec = spec_from_file_location(f"_called_{Path(file).stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


@contextmanager
def _process_group(job: WorkerCall, backend: str) -> Iterator[None]:
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store: Any = FakeStore() if job.alone else FileStore(job.store, job.world_size)
    backend = "fake" if job.alone else backend
    dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.world_size, timeout=PATIENCE)
    try:
        dist.barrier()  # a rank that fails at once would break the connections of one that is still making them
        yield
    except BaseException as error:
        if not _hangs(error):
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _hangs(error: BaseException) -> bool:
    """Return whether a backend's rules refuse a job: collectives of gloo then wait for one another, and groups cannot end."""
    return isinstance(error, MindSpeedError) and any(problem.code == _DEADLOCK for problem in error.problems)


@contextmanager
def _megatron_groups(job: WorkerCall) -> Iterator[None]:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from mindspeed.platforms import runtime

    gc.collect()
    gc.freeze()  # what is here now need not be looked at when the job is over
    torch.set_num_threads(1)
    torch.manual_seed(0)
    runtime.take_device(job.rank)
    with _process_group(job, "nccl"), _loss_scales_kept():
        try:
            parallel_state.initialize_model_parallel()
            yield
            dist.barrier()
        finally:
            _take_apart()
            parallel_state.destroy_model_parallel()


@contextmanager
def _loss_scales_kept() -> Iterator[None]:
    """Megatron keeps the last scale of added losses in classes: a layer alone leaves a number, a schedule a vector of one."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    scalers = (MoEAuxLossAutoScaler, MTPLossAutoScaler)
    before = [None if (scale := scaler.main_loss_backward_scale) is None else scale.clone() for scaler in scalers]
    try:
        yield
    finally:
        for scaler, scale in zip(scalers, before, strict=True):
            scaler.main_loss_backward_scale = scale


def _take_apart() -> None:
    """Free what a job has made of Megatron: its objects refer to one another through autograd nodes, which Python's collector
    cannot see, or stay in caches of methods (rotary embedding), and a process group that is never freed keeps its threads."""
    from megatron.core import parallel_state
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from torch.nn import Module

    from mindspeed.ops.attention_mask import forget_compressed_masks

    for module in (moe_utils, parallel_state):  # one of them keeps auxiliary losses with their groups, by Megatron's version
        if tracker := getattr(module, "get_moe_layer_wise_logging_tracker", None):
            tracker().clear()
    MTPLossLoggingHelper.tracker.clear()
    forget_compressed_masks()
    for part in [value for value in gc.get_objects() if issubclass(type(value), Module | MegatronOptimizer)]:
        vars(part).clear()
    gc.collect()
