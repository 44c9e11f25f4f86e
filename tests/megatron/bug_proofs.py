"""Show bugs of Megatron: ``python -m tests.megatron.bug_proofs [NAME ...]`` prints what was seen as JSON.

Each function is of a row of ``traps.yaml``, runs the code of Megatron that has the bug and returns what is wrong, or
an empty text. It runs twice on the platform cpu: without the patches that mend the row, and with them. A proof raises
ImportError where a release does not have the code, and CannotRunError where this machine or this copy of Megatron does not
suffice.
"""

import ctypes
import importlib
import inspect
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final, Literal
from unittest import mock

import torch
import torch.distributed as dist

import mindspeed
from mindspeed.engine.inspection.megatron_copies import megatron_version
from mindspeed.engine.resolution.environment import made_up
from mindspeed.megatron.fixes.feature import TABLES, mended_bugs
from mindspeed.problems import PatchError
from mindspeed.workbench.lint.traps import Trap, known_traps
from tests.forked_ranks import run_ranks

PR_GET_PDEATHSIG: Final = 2
"""The option of Linux that reads which signal a process gets when its parent ends."""

PROOFS: Final[dict[str, Callable[[], str]]] = {}


class CannotRunError(Exception):
    """Say why a proof cannot run on this machine or on this copy of Megatron."""


def shows(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register a function as the proof of a row."""

    def register(proof: Callable[[], str]) -> Callable[[], str]:
        PROOFS[name] = proof
        return proof

    return register


def without_fixes(bug: Trap) -> str:
    """Return what a row's proof shows without the patches that mend it."""
    with ExitStack() as stack:
        for target in (row["target"] for row in TABLES["fixes"] if row["bug"] == bug.name):
            with suppress(ImportError, PatchError):  # other releases are mended by other patches
                importlib.import_module(target.partition(":")[0])  # which would be patched as it is imported
                stack.enter_context(mindspeed.suspended(target))
        return PROOFS[bug.name]()


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the error that a call raises, as text."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # any error is what the bug is
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return ""


def of_checkout(name: str) -> ModuleType:
    """Import a module that checkouts of Megatron-LM have, and wheels of megatron-core do not."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CannotRunError(str(error).partition(" (")[0]) from error


@contextmanager
def one_rank() -> Iterator[Any]:
    """Make the groups of a job of one process, and give them."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(os.path.join(folder, "store"), 1), rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            yield ProcessGroupCollection.use_mpu_process_groups()
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def config(**fields: Any) -> Any:
    """Return the configuration of a tiny model on the host."""
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "add_bias_linear": False}
    return TransformerConfig(**{**sizes, "use_cpu_initialization": True, **fields})


def router(groups: Any, **fields: Any) -> Any:
    """Return a router of four experts with known weights."""
    from megatron.core.transformer.moe.router import TopKRouter

    made = TopKRouter(config(num_moe_experts=4, **fields), groups)
    made.weight.data = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    return made


def hidden(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(length, batch, 8, generator=torch.Generator().manual_seed(0))


# Layers without Transformer Engine, Apex, Triton or a GPU.


@shows("norms-of-torch-under-sequence-parallelism")
def norms_of_torch() -> str:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return error_of(WrappedTorchNorm, config(tensor_model_parallel_size=2, sequence_parallel=True), 8)


@shows("widths-of-latent-attention")
def widths_of_latent_attention() -> str:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    with one_rank():
        return error_of(DotProductAttention, config(), 1, AttnMaskType.causal, "self", k_channels=6, v_channels=4)


@shows("routers-without-transformer-engine")
def routers_without_engine() -> str:
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    tensors = [hidden(2), torch.ones(4, 8), None][: len(inspect.signature(router_gating_linear).parameters) - 1]
    return error_of(router_gating_linear, *tensors, torch.float32)


@shows("version-of-a-missing-transformer-engine")
def version_of_missing_engine() -> str:
    from megatron.core.utils import is_te_min_version

    return error_of(is_te_min_version, "0.1")


@shows("predictions-of-mocked-layers")
def predictions_of_mocked_layers() -> str:
    from megatron.core.tensor_parallel.inference_layers import is_inference_column_parallel_linear

    return error_of(is_inference_column_parallel_linear, torch.nn.Linear(1, 1))


@shows("kernels-that-import-triton")
def kernels_that_import_triton() -> str:
    if importlib.util.find_spec("triton") is not None:
        raise CannotRunError("triton is installed here")
    return in_fork(first_that_imports_triton)


def first_that_imports_triton() -> str:
    """Return the first module whose import fails for want of triton."""
    for name in TABLES["unguarded"]:
        sys.modules.pop(name, None)
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name == "triton":
                return f"without triton fails: import {name}"
    return ""


def in_fork(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns in a process that is forked from this one."""
    forks = multiprocessing.get_context("fork")
    here, there = forks.Pipe()
    process = forks.Process(target=lambda: there.send(function(*args)))
    process.start()
    there.close()
    result = here.recv()
    process.join()
    return result


@shows("compiler-of-cuda-at-start")
def compiler_of_cuda_at_start() -> str:
    fused_kernels = of_checkout("megatron.legacy.fused_kernels")
    if torch.utils.cpp_extension.CUDA_HOME is not None:
        raise CannotRunError("a CUDA compiler is installed here")
    return error_of(fused_kernels.load, SimpleNamespace(rank=0))


@shows("data-helpers-of-another-python")
def data_helpers_of_another_python() -> str:
    from megatron.core.datasets import utils

    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "bin" / "python3"
        other.parent.mkdir()
        other.write_text("#!/bin/sh\nexit 1\n")
        other.chmod(0o755)
        (Path(folder) / "Makefile").write_text("LIBEXT = .other\ndefault:\n\t@command -v python3 > $(CURDIR)/python\n")
        (Path(folder) / "__init__.py").touch()
        with (
            mock.patch.object(utils, "__file__", f"{folder}/utils.py"),
            mock.patch.dict(os.environ, PATH=f"{other.parent}:/usr/bin:/bin"),
        ):
            utils.compile_helpers()
        used = Path((Path(folder) / "python").read_text().strip())
        return "" if used.parent == Path(sys.executable).parent else "compiles for the first python3 on PATH"


@shows("processor-cores-of-a-missing-gpu")
def processor_cores_of_a_missing_gpu() -> str:
    from megatron.core.pipeline_parallel.utils import set_ideal_affinity_for_current_gpu

    return error_of(set_ideal_affinity_for_current_gpu)


# Optimizers and checkpoints.


@shows("step-of-a-fresh-adam")
def step_of_a_fresh_adam() -> str:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    inner = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    return error_of(DistributedOptimizer.state_dict, SimpleNamespace(optimizer=inner, grad_scaler=None))


@contextmanager
def distributed_optimizer() -> Iterator[tuple[Any, Any]]:
    """Give a model of two weights and its distributed optimizer after a step."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    with one_rank():
        layers = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 1, bias=False)).cuda()
        layers.sharded_state_dict = lambda prefix="", *_, **__: shards_of(layers, prefix)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = DistributedDataParallel(config(), ddp, layers)
        made = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=True), [model])
        model.zero_grad_buffer()
        model(torch.ones(1, 4)).sum().backward()
        model.finish_grad_sync()
        made.step()
        yield model, made


def shards_of(module: torch.nn.Module, prefix: str) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    return {
        prefix + name: ShardedTensor.from_rank_offsets(prefix + name, value, replica_id=(0, 0, 0))
        for name, value in module.state_dict(keep_vars=True).items()
    }


def steps(optimizer: Any) -> list[Any]:
    """Return the step numbers that the parameters of a distributed optimizer have."""
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
    return [values.get("step", torch.tensor(math.nan)) for values in inner.state.values()]


@shows("steps-that-parameters-share")
def steps_that_parameters_share() -> str:
    with distributed_optimizer() as (_, optimizer):
        optimizer.load_state_dict(optimizer.state_dict())
        counted = steps(optimizer)
        separate = len({step.data_ptr() for step in counted})
        return "" if separate == len(counted) else f"{len(counted)} parameters count in {separate} step number"


@shows("steps-that-are-not-saved")
def steps_that_are_not_saved() -> str:
    from megatron.core import dist_checkpointing

    with distributed_optimizer() as (model, optimizer), tempfile.TemporaryDirectory() as folder:

        def state(is_loading: bool) -> Any:
            return {"optimizer": optimizer.sharded_state_dict(shards_of(model.module, ""), is_loading=is_loading)}

        if error := error_of(lambda: dist_checkpointing.save(state(False), folder)):
            return f"the save fails: {error}"
        for step in steps(optimizer):
            step.zero_()
        loaded = dist_checkpointing.load(state(True), folder)["optimizer"]
        if error := error_of(optimizer.load_state_dict, loaded):
            return f"the load fails: {error}"
        found = {float(step) for step in steps(optimizer)}
        return "" if found == {1.0} else f"after a load the step is {found}, not 1"


@shows("interpreter-for-a-synchronous-save")
def interpreter_for_a_synchronous_save() -> str:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    started = []

    def start(path: Any, args: Any, descriptors: Any) -> int:
        started.append(args)
        raise OSError("no process is started")

    with (
        one_rank(),
        tempfile.TemporaryDirectory() as folder,
        mock.patch("multiprocessing.util.spawnv_passfds", start),
        mock.patch.object(filesystem_async, "_results_queue", None),
    ):
        weight = dist_checkpointing.ShardedTensor.from_rank_offsets("weight", torch.ones(8))
        error = error_of(dist_checkpointing.save, {"weight": weight}, folder)
    if error and not started:
        raise CannotRunError(error)
    return "starts an interpreter" if started else ""


@shows("writers-that-outlive-their-rank")
def writers_that_outlive_their_rank() -> str:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    if not hasattr(FileSystemWriterAsync, "write_preloaded_data_multiproc"):
        raise ImportError("writers are threads in this release")

    def signal_of_writer() -> int:
        number = ctypes.c_int()

        def report(_: Any) -> None:
            ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))

        queues = {"results_queue": SimpleNamespace(put=report), "count_queue": mock.Mock()}
        FileSystemWriterAsync.write_preloaded_data([], 0, (os.devnull, "", ([], [])), **queues, use_fsync=False)
        return number.value

    return "" if in_fork(signal_of_writer) == signal.SIGKILL else "a writer gets no signal when its rank ends"


@shows("weight-decay-after-a-resume")
def weight_decay_after_a_resume() -> str:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    def scheduler(final_decay: float) -> Any:
        groups = [{"params": [], "wd_mult": 1.0, "lr_mult": 1.0, "max_lr": 1.0, "min_lr": 0.0}]
        optimizer = SimpleNamespace(param_groups=groups, config=SimpleNamespace(lr=1.0, min_lr=0.0))
        decay = (final_decay, final_decay, 4, "constant")
        return OptimizerParamScheduler(optimizer, 0.0, 1.0, 0.0, 0, 8, "constant", *decay, True, False)

    saved, resumed = scheduler(0.1), scheduler(0.5)
    saved.step(increment=2)
    resumed.load_state_dict(saved.state_dict())
    expected, found = (one.optimizer.param_groups[0]["weight_decay"] for one in (saved, resumed))
    return "" if found == expected else f"weight decay {found} after a resume, {expected} in the checkpoint"


@shows("learning-rates-of-groups-after-a-resume")
def learning_rates_of_groups_after_a_resume() -> str:
    from megatron.core.optimizer import OptimizerConfig, _get_param_groups, get_standard_config_overrides
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[0].weight.is_embedding_or_output_parameter = True
    with one_rank():
        options = OptimizerConfig(lr=1.0, min_lr=0.0, decoupled_lr=0.25, decoupled_min_lr=0.0)
        groups = _get_param_groups([model], options, get_standard_config_overrides(options))
        before = [group["max_lr"] for group in groups]
        matched = MegatronOptimizer._filter_and_reorder_param_groups(groups, [dict(group) for group in groups])
    after = [group["max_lr"] for group in matched]
    return "" if after == before else f"learning rates {after} after a resume, {before} before"


@shows("order-of-parameter-groups-by-rank")
def order_of_parameter_groups_by_rank() -> str:
    from megatron.core.optimizer import OptimizerConfig, _get_param_groups

    has_overrides = "config_overrides" in inspect.signature(_get_param_groups).parameters
    options = (OptimizerConfig(lr=1.0), {}) if has_overrides else (None, None, 1.0, 1.0, 0.0, None, None)

    def kinds(*experts: bool) -> list[bool]:
        model = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in experts)
        for layer, expert in zip(model, experts, strict=True):
            layer.weight.allreduce = not expert
        return [group["is_expert_parallel"] for group in _get_param_groups([model], *options)]

    with one_rank():
        first, second = kinds(False, True), kinds(True, False)
    return "" if first == second else "the group of experts is first on a rank whose first parameter is of an expert"


# Sums over ranks and losses.


@shows("sums-of-tensors-with-strides")
def sums_of_tensors_with_strides() -> str:
    from megatron.core.tensor_parallel.mappings import _reduce

    two = SimpleNamespace(size=lambda: 2)

    def add_other_rank(tensor: torch.Tensor, group: Any = None) -> None:
        tensor.mul_(2)

    with mock.patch.object(dist, "all_reduce", add_other_rank):
        found = _reduce(torch.ones(2, 3).t(), two)
    return "" if torch.equal(found, torch.full((3, 2), 2.0)) else "the sum over two ranks of ones is 1"


@shows("sequence-auxiliary-loss-by-micro-batch-size")
def sequence_auxiliary_loss_by_micro_batch_size() -> str:
    def weight(groups: Any, batch: int) -> float:
        kind = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1.0}
        one = router(groups, calculate_per_token_loss=True, **kind)
        tokens = hidden(16).expand(-1, batch, -1)
        probs, _ = one.routing(torch.nn.functional.linear(tokens, one.weight))
        (probs.sum() * 0).backward()
        return float(one.weight.grad.norm()) / (16 * batch)

    with one_rank() as groups, unscaled(losses_of_experts()):
        alone, together = weight(groups, 1), weight(groups, 2)
    same = math.isclose(alone, together, rel_tol=1e-4)
    return "" if same else f"with two equal sequences the loss weighs {together / alone:.2f} of what it weighs with one"


def losses_of_experts() -> Any:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    return MoEAuxLossAutoScaler


def unscaled(scaler: Any) -> Any:
    """Scale a loss by 1 in a with-block."""
    return mock.patch.object(scaler, "main_loss_backward_scale", torch.ones(1))


def tokens_balanced_elsewhere(**fields: Any) -> str:
    """Return the share of tokens for which the auxiliary loss counts other experts than the router selects."""
    seen = []

    def record(probs: Any, scores: Any, routing_map: torch.Tensor, *_: Any, **__: Any) -> Any:
        seen.append(routing_map)
        return probs

    with one_rank() as groups:
        kind = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0, "moe_router_topk": 2}
        one = router(groups, **kind, **fields)
        if one.expert_bias is not None:
            one.expert_bias.copy_(torch.tensor([1.0, 0.0, 0.0, -1.0]))
        one._apply_aux_loss = record
        _, selected = one.routing(torch.nn.functional.linear(hidden(64), one.weight))
    (balanced,) = seen
    share = float((balanced != selected).any(-1).float().mean())
    return f"the loss balances other experts for {share:.0%} of the tokens" if share else ""


@shows("auxiliary-loss-of-other-experts-by-groups")
def auxiliary_loss_of_other_experts_by_groups() -> str:
    return tokens_balanced_elsewhere(
        moe_router_num_groups=2,
        moe_router_group_topk=1,
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=1.0,
    )


@shows("auxiliary-loss-of-other-experts-by-bias")
def auxiliary_loss_of_other_experts_by_bias() -> str:
    return tokens_balanced_elsewhere(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")


@shows("auxiliary-scores-in-bf16")
def auxiliary_scores_in_bf16() -> str:
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "compute_routing_scores_for_aux_loss"):
        raise ImportError("this release has no compute_routing_scores_for_aux_loss")
    logits = torch.tensor([[4.0, 4.0625, 4.125, 4.1875]], dtype=torch.bfloat16)
    _, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 1, "sigmoid")
    different = len(set(scores.flatten().tolist()))
    return "" if different == 4 else f"four logits have {different} scores"


@shows("padding-mask-under-an-expert-bias")
def padding_mask_under_an_expert_bias() -> str:
    with one_rank() as groups:
        one = router(groups, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
        if "padding_mask" not in inspect.signature(one.routing).parameters:
            raise ImportError("routers of this release have no padding mask")
        logits = torch.nn.functional.linear(hidden(6), one.weight)
        return error_of(one.routing, logits, padding_mask=torch.tensor([False] * 4 + [True] * 2))


@shows("logged-z-loss-of-one-rank")
def logged_z_loss_of_one_rank() -> str:
    from megatron.core.transformer.moe import router as module

    record = mock.Mock()
    tracked = {
        "save_to_aux_losses_tracker": record,
        "get_moe_metrics_tracker": lambda: SimpleNamespace(record=record),
    }
    with one_rank() as groups, ExitStack() as stack:
        one = router(groups, moe_z_loss_coeff=1.0)
        for name in tracked.keys() & vars(module).keys():
            stack.enter_context(mock.patch.object(module, name, tracked[name]))
        one.apply_z_loss(torch.ones(4, 4, requires_grad=True))
    known = {"reduce_group", "avg_group"} & record.call_args.kwargs.keys()
    return "" if known else "the z-loss is logged without a group to average over"


@shows("experts-capacity-above-the-tokens")
def experts_capacity_above_the_tokens() -> str:
    from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping

    probs = torch.rand(4, 2)
    return error_of(apply_router_token_dropping, probs, probs > 0, router_topk=2, capacity_factor=8.0, drop_policy="probs")


def scale_of(scaler: Any, cp: int, **fields: Any) -> float:
    """Return the scale that the schedule gives to a loss, of four micro-batches."""
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    given = {"calculate_per_token_loss": False, "grad_scale_func": None, "timers": None, "num_moe_experts": None}
    settings = SimpleNamespace(**{**given, "mtp_num_layers": None, **fields})
    model = torch.nn.Linear(1, 1)
    model.vp_stage = None

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        return output.sum(), {}

    with unscaled(scaler):
        forward_step_calc_loss(model, torch.ones(1), loss, settings, None, False, 4, [], cp_group_size=cp, is_last_stage=True)
        return float(scaler.main_loss_backward_scale)


@shows("auxiliary-losses-under-context-parallelism")
def auxiliary_losses_under_context_parallelism() -> str:
    found = scale_of(losses_of_experts(), 2, num_moe_experts=4)
    return "" if found == 0.5 else f"with cp 2 and four micro-batches the scale is {found}, not 0.5"


@shows("indexer-loss-by-micro-batches")
def indexer_loss_by_micro_batches() -> str:
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

    found = scale_of(DSAIndexerLossAutoScaler, 1, experimental_attention_variant="dsa")
    return "" if found == 0.25 else f"with four micro-batches the scale is {found}, not 0.25"


@shows("packed-predictions-with-padding")
def packed_predictions_with_padding() -> str:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    if "packed_seq_params" not in inspect.signature(roll_tensor).parameters:
        raise ImportError("this release predicts no packed sequences")
    ends = {"cu_seqlens_q": torch.tensor([0, 3, 5]), "cu_seqlens_q_padded": torch.tensor([0, 4, 8])}
    packed = PackedSeqParams(qkv_format="thd", **ends)
    rolled, *_ = roll_tensor(torch.tensor([[1, 2, 3, 0, 5, 6, 0, 0]]), packed_seq_params=packed)
    return "" if rolled[0, 4] == 6 else f"after token 5 of the second sequence comes {int(rolled[0, 4])}, not 6"


@shows("size-of-logged-losses-with-predictions")
def size_of_logged_losses_with_predictions() -> str:
    from megatron.core.transformer.moe import moe_utils

    if "mtp_num_layers" not in inspect.signature(moe_utils.track_moe_metrics).parameters:
        raise ImportError("this release tracks no losses of predictions")
    sizes = []

    def record(*_: Any, **__: Any) -> None:
        sizes.append(len(moe_utils.get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"]))

    with one_rank(), mock.patch.object(moe_utils, "reduce_aux_losses_tracker_across_ranks", record):
        moe_utils.track_moe_metrics(
            1.0, 1, None, force_initialize=True, track_names=["load_balancing_loss"], num_layers=4, mtp_num_layers=1
        )
    if not sizes:
        raise ImportError("this release tracks losses otherwise")
    return "" if sizes == [5] else f"a stage without experts reduces {sizes[0]} numbers, others 5"


@shows("upcycling-of-virtual-stages")
def upcycling_of_virtual_stages() -> str:
    from megatron.core.transformer.moe import upcycling_utils

    moe, dense = ([torch.nn.Linear(1, 1) for _ in range(2)] for _ in range(2))
    given = []
    with mock.patch.object(upcycling_utils, "_convert_to_moe_state_dict", lambda *models: given.append(models) or {}):
        upcycling_utils.upcycle_state_dict(moe, dense)
    return "" if given[0] == (moe[0], dense[0]) else "the weights of the dense model take the place of the model with experts"


@shows("query-groups-that-do-not-divide-the-heads")
def query_groups_that_do_not_divide_the_heads() -> str:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    with one_rank():
        spec = get_gpt_layer_local_spec().submodules.self_attention
        sizes = config(hidden_size=24, num_attention_heads=6, num_query_groups=4)
        attention = build_module(spec, config=sizes, layer_number=1)
        return error_of(attention, torch.ones(4, 1, 24), attention_mask=torch.zeros(1, 1, 4, 4, dtype=torch.bool))


@shows("layers-that-do-not-divide-in-recomputation")
def layers_that_do_not_divide_in_recomputation() -> str:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    idle = ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules())
    with one_rank():
        layers = TransformerBlockSubmodules(layer_specs=[idle] * 3)
        block = TransformerBlock(config(num_layers=3, **recompute), layers, post_layer_norm=False, post_process=False)
        return error_of(block, hidden(4).requires_grad_(), None)


@shows("special-tokens-without-end")
def special_tokens_without_end() -> str:
    from megatron.core.tokenizers.text.libraries.abstract_tokenizer import MegatronTokenizerTextAbstract

    abstract = MegatronTokenizerTextAbstract.__abstractmethods__
    tokenizer = type("Tokenizer", (MegatronTokenizerTextAbstract,), dict.fromkeys(abstract, lambda self: None))()
    error = error_of(lambda: tokenizer.cls_id)
    return error if error.startswith("RecursionError") else ""


@shows("overlap-of-transfers-without-transformer-engine")
def overlap_without_engine() -> str:
    initialize = of_checkout("megatron.training.initialize")
    return error_of(initialize._initialize_tp_communicators)


@shows("norms-of-vision-without-transformer-engine")
def norms_of_vision_without_engine() -> str:
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec

    with one_rank():
        return error_of(CLIPViTModel, config(), get_vit_layer_with_local_spec(), img_h=28, img_w=28)


@shows("experimental-attention-of-local-layers")
def experimental_attention_of_local_layers() -> str:
    specs = importlib.import_module("megatron.core.models.gpt.experimental_attention_variant_module_specs")
    return error_of(specs._get_backend_spec_provider, SimpleNamespace(transformer_impl="local"))


@shows("sparse-attention-without-a-layer")
def sparse_attention_without_a_layer() -> str:
    specs = importlib.import_module("megatron.core.models.gpt.experimental_attention_variant_module_specs")
    config = SimpleNamespace(experimental_attention_variant="dsa")
    error = error_of(specs.get_experimental_attention_variant_module_spec, config, backend=mock.Mock())
    return error if error.startswith("ValueError") else ""


@shows("predictions-without-sparse-attention")
def predictions_without_sparse_attention() -> str:
    specs = importlib.import_module("megatron.core.models.gpt.experimental_attention_variant_module_specs")
    if hasattr(specs, "get_transformer_layer_with_experimental_attention_variant_spec"):
        return ""  # from which programs take the layer of predictions
    layers = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    given, config = layers.get_gpt_layer_local_spec(), SimpleNamespace(experimental_attention_variant="dsa", use_kitchen=False)
    with (
        mock.patch.object(layers, "get_gpt_mtp_block_spec_for_backend") as made,
        mock.patch.object(specs, "get_experimental_attention_variant_module_spec", return_value="sparse attention"),
    ):
        layers.get_gpt_mtp_block_spec(config, given, use_transformer_engine=False)
    attention = made.call_args.kwargs["spec"].submodules.self_attention
    return "" if attention == "sparse attention" else f"predictions have {attention.module.__name__} of ordinary layers"


@shows("indexer-losses-of-predictions")
def indexer_losses_of_predictions() -> str:
    helper = importlib.import_module("megatron.core.transformer.experimental_attention_variant.dsa").DSAIndexerLossLoggingHelper
    with mock.patch.object(helper, "tracker", {"values": torch.zeros(2)}):
        return error_of(helper.save_loss_to_tracker, torch.ones(()), 3, 2)


@shows("sparse-attention-without-its-package")
def sparse_attention_without_its_package() -> str:
    dsa = importlib.import_module("megatron.core.transformer.experimental_attention_variant.dsa")
    return error_of(dsa.rotate_activation, torch.ones(2, 8, dtype=torch.bfloat16))


@shows("steps-of-torch-fsdp2")
def steps_of_torch_fsdp2() -> str:
    sharded = importlib.import_module("megatron.core.distributed.torch_fully_sharded_data_parallel")
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads").finalize_model_grads
    given = {"force_all_reduce": False} if "force_all_reduce" in inspect.signature(finalize).parameters else {}
    return error_of(object.__new__(sharded.TorchFullyShardedDataParallel).finish_grad_sync, **given)


@shows("no-evaluation-interval")
def no_evaluation_interval() -> str:
    training = of_checkout("megatron.training.training")
    given = {"train_samples": None, "train_iters": 4, "global_batch_size": 2, "eval_iters": 0, "eval_interval": None}
    values = SimpleNamespace(**given, full_validation=False, skip_train=False)
    with mock.patch.object(training, "get_args", return_value=values):
        return error_of(training.get_train_valid_test_num_samples)


# Several ranks.


def printed(script: str, ranks: int) -> list[str]:
    """Return the lines that a script of this folder prints on its first rank."""
    return first_rank(importlib.import_module(f"tests.megatron.{script}").main, ranks)


def first_rank(main: Callable[[], None], ranks: int) -> list[str]:
    """Return the lines that a function prints on the first of ranks that are forked from this process."""
    with tempfile.TemporaryDirectory() as folder:
        statuses = run_ranks(ranks, partial(print_into, Path(folder), main), limit=120)
        if any(statuses.values()):
            raise RuntimeError(f"ranks ended with {statuses}")
        return (Path(folder) / "0").read_text().splitlines()


def print_into(folder: Path, main: Callable[[], None], rank: int) -> int:
    """Run a function as one of the ranks; what it prints goes to a file with the number of the rank."""
    with (folder / str(rank)).open("w") as file, redirect_stdout(file):
        main()
    return 0


def unequal_on_two_ranks(quantity: str) -> str:
    """Return the line of a quantity that is not the same on two ranks and on one."""
    from tests.megatron.stock_tensor_parallel import main

    (line,) = first_rank(partial(main, [quantity]), 2)
    two, one = (words.split()[0] for words in line.partition(": ")[2].split(", "))
    return "" if two == one else line


@shows("attention-sinks-of-one-rank-in-the-norm")
def attention_sinks_of_one_rank_in_the_norm() -> str:
    if not hasattr(config(), "softmax_type"):
        raise ImportError("this release has no attention sinks")
    return unequal_on_two_ranks("norm of attention sinks")


@shows("label-smoothing-of-a-share-of-the-vocabulary")
def label_smoothing_of_a_share_of_the_vocabulary() -> str:
    return unequal_on_two_ranks("loss with label smoothing")


@shows("loss-of-gathered-logits")
def loss_of_gathered_logits() -> str:
    return unequal_on_two_ranks("loss of gathered logits")


@shows("latent-attention-keys-of-one-rank")
def latent_attention_keys_of_one_rank() -> str:
    differences = map(str.split, printed("stock_latent_attention", 2))
    return ", ".join(f"the gradient of {name} is {value} off" for name, value in differences if float(value) > 1e-5)


def loss_of_another_weight(loss: str) -> str:
    """Return the lines in which a loss of routers has another weight on two ranks than on one, with a loss per token."""
    lines = [line for line in printed("stock_loss_weights", 2) if "per token" in line]
    return ", ".join(line for line in lines if f"{loss} 1.000" not in line)


@shows("router-losses-per-token")
def router_losses_per_token() -> str:
    return loss_of_another_weight("aux loss")


@shows("router-z-loss-per-token")
def router_z_loss_per_token() -> str:
    return loss_of_another_weight("z-loss")


@shows("global-auxiliary-loss-by-replicas")
def global_auxiliary_loss_by_replicas() -> str:
    from megatron.core.transformer.moe.router import TopKRouter

    if not hasattr(TopKRouter, "_apply_global_aux_loss"):
        raise ImportError("this release has no global auxiliary loss")
    (line,) = [line for line in printed("stock_global_aux_loss", 2) if line.startswith("global_aux_loss: ")]
    return "" if line.endswith(" 1.000") else line


@shows("padding-mask-of-other-groups")
def padding_mask_of_other_groups() -> str:
    from megatron.core.models.gpt import GPTModel

    if "padding_mask" not in inspect.signature(GPTModel._preprocess).parameters:
        raise ImportError("models of this release have no padding mask")
    (line,) = printed("stock_padding_mask", 4)
    return "" if line.endswith("[]") else line


EXPERTS: Final = ("--experts", "4", "--dispatcher", "alltoall")
LAYOUTS: Final = (("--ep", "2"), ("--etp", "2"), ("--tp", "2", "--sequence-parallel", "--etp", "1"))
"""Layouts of a model with experts on two ranks; the first gives the experts to ranks whole."""


def trained(layouts: Sequence[Sequence[str]]) -> None:
    """Print the losses and the norms of gradients of a model with experts in each layout."""
    from tests.megatron.plain_script import parse, run

    dist.init_process_group("nccl")
    print(json.dumps([run(parse([*EXPERTS, *layout]))[:2] for layout in layouts]))
    dist.destroy_process_group()


def differences_by_layout() -> list[tuple[float, float]]:
    """Return by how much losses and norms of each layout differ from those of one process, relative to them."""
    ((alone,), two) = (
        json.loads(first_rank(partial(trained, layouts), ranks)[-1]) for ranks, layouts in ((1, [()]), (2, LAYOUTS))
    )
    return [
        tuple(max(abs(a / b - 1) for a, b in zip(*values, strict=True)) for values in zip(found, alone, strict=True))
        for found in two
    ]


@shows("biases-of-experts-that-a-rank-holds-whole")
def biases_of_experts_that_a_rank_holds_whole() -> str:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module

    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 8, "moe_token_dispatcher_type": "alltoall"}
    with one_rank():
        try:
            spec = get_moe_module_spec(use_te=False, num_experts=4)
            build = spec if isinstance(spec, partial) else partial(build_module, spec)
            layer = build(config=config(add_bias_linear=True, bias_activation_fusion=False, **experts))
        except AssertionError as error:
            raise ImportError("experts of this release have no biases") from error
        return error_of(layer, hidden(4).requires_grad_())


@shows("expert-gradients-of-other-shards")
def expert_gradients_of_other_shards() -> str:
    found = zip(LAYOUTS, differences_by_layout(), strict=True)
    wrong = {" ".join(layout): loss for layout, (loss, _) in found if loss > 2e-6}
    return ", ".join(f"losses differ by {loss:.1e} with {layout}" for layout, loss in wrong.items())


@shows("sinkhorn-by-layout")
def sinkhorn_by_layout() -> str:
    (line,) = printed("stock_sinkhorn", 1)
    return "" if line.endswith(" 0.0%") else line


@shows("prediction-loss-by-replica")
def prediction_loss_by_replica() -> str:
    from megatron.core.transformer.multi_token_prediction import process_mtp_loss

    if "original_num_tokens" not in inspect.getsource(process_mtp_loss):
        raise ImportError("this release weighs tokens of predictions otherwise")
    (line,) = printed("stock_mtp_loss", 1)
    apart, together = (part.rpartition(": ")[2] for part in line.split(", "))
    return "" if apart == together else line


@dataclass(frozen=True, slots=True)
class Seen:
    """What a proof has shown: the bug in words, or why it shows none."""

    state: Literal["shown", "right", "absent", "not run"]
    text: str = ""


def look(proof: Callable[[], str]) -> Seen:
    """Run a proof."""
    try:
        text = proof()
    except ImportError as error:
        return Seen("absent", str(error).partition(" (")[0])  # without the path of the module
    except CannotRunError as reason:
        return Seen("not run", str(reason))
    return Seen("shown", text) if text else Seen("right")


def use_present_names() -> None:
    """Give a class of Megatron 0.14 the name that it has in later releases."""
    from megatron.core import process_groups_config

    if not hasattr(process_groups_config, "ProcessGroupCollection"):
        process_groups_config.ProcessGroupCollection = process_groups_config.ModelCommProcessGroups


def main() -> None:
    """Print what every proof, or those that are named, has shown."""
    names = sys.argv[1:] or list(PROOFS)
    bugs = {trap.name: trap for trap in known_traps()}
    version = megatron_version()
    mindspeed.activate(mindspeed.plan(level=0, environment=made_up("cpu", version)))
    use_present_names()
    found = {}
    for name in names:
        found[name] = {"without": asdict(look(partial(without_fixes, bugs[name])))}
        if name in mended_bugs(version):
            found[name]["with"] = asdict(look(PROOFS[name]))
    print(json.dumps({"megatron": version, "bugs": found}))


if __name__ == "__main__":
    main()
