"""The Megatron fixes, one by one, in this process."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import mindspeed
from mindspeed.engine.resolution.environment import version_in
from mindspeed.megatron.fixes import kernels
from mindspeed.problems import Fix, PlatformError
from mindspeed.registry import probe
from tests.megatron.on_ranks import cycles, host_weights, reduced_by_instances

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_no_version_is_reached_without_transformer_engine():
    from megatron.core.utils import is_te_min_version

    assert is_te_min_version("0.1") is False
    assert is_te_min_version("0.1", check_equality=False) is False


def test_without_transformer_engine_its_layers_name_the_field_that_provides_them():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    with pytest.raises(PlatformError) as refused:
        get_gpt_layer_with_transformer_engine_spec()
    assert refused.value.problems[0].fix == (Fix.give_field("transformer_engine_layers", True),)


def test_processes_stay_on_their_cores_without_a_gpu():
    from megatron.core.pipeline_parallel.utils import set_ideal_affinity_for_current_gpu

    cores = psutil.Process().cpu_affinity()
    set_ideal_affinity_for_current_gpu()
    assert psutil.Process().cpu_affinity() == cores


@pytest.mark.parametrize(("layer", "answer"), [(torch.nn.Linear, True), (torch.nn.ReLU, False), (None, False)])
def test_no_module_is_a_mock_of_a_missing_layer(monkeypatch, layer, answer):
    from megatron.core.tensor_parallel import inference_layers

    from mindspeed.megatron.fixes.layers import is_no_mock

    def original(module):
        return isinstance(module, inference_layers.InferenceColumnParallelLinear)

    monkeypatch.setattr(inference_layers, "InferenceColumnParallelLinear", layer, raising=False)
    assert is_no_mock(original)(torch.nn.Linear(1, 1)) is answer


def test_norms_under_sequence_parallelism_are_marked_and_the_config_stays():
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "tensor_model_parallel_size": 2}
    config = TransformerConfig(**sizes, sequence_parallel=True, normalization="RMSNorm")
    norm = WrappedTorchNorm(config, 8)
    assert isinstance(norm, torch.nn.RMSNorm)
    assert [parameter.sequence_parallel for parameter in norm.parameters()] == [True]
    assert config.sequence_parallel
    alone = WrappedTorchNorm(TransformerConfig(**sizes), 8)
    assert [hasattr(parameter, "sequence_parallel") for parameter in alone.parameters()] == [False, False]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_router_is_a_linear_layer_in_its_own_dtype(dtype, bias):
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    torch.manual_seed(0)
    router = torch.float64 if dtype is torch.float64 else torch.float32
    parts = [torch.randn(3, 2, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype), torch.randn(4, dtype=dtype) if bias else None]
    ours = [part.clone().requires_grad_() if part is not None else None for part in parts]
    plain = [part.clone().requires_grad_() if part is not None else None for part in parts]
    weights = torch.randn(3, 2, 4, dtype=router)
    output = router_gating_linear(*ours, router)
    expected = torch.nn.functional.linear(*(part.to(router) if part is not None else None for part in plain))
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    assert output.dtype is router
    assert torch.equal(output, expected)
    for mine, other in zip(ours, plain, strict=True):
        if mine is not None:
            torch.testing.assert_close(mine.grad, other.grad)


def test_splits_of_an_all_to_all_become_numbers():
    from megatron.core.transformer.moe.moe_utils import maybe_move_tensor_to_cpu

    moved = maybe_move_tensor_to_cpu(torch.tensor([1, 2], device="cuda"), as_numpy=True)
    assert (type(moved).__name__, moved.tolist()) == ("ndarray", [1, 2])
    assert maybe_move_tensor_to_cpu(None, as_numpy=True) is None


def test_every_function_that_megatron_compiles_is_plain():
    import importlib

    from mindspeed.megatron.fixes.feature import TABLES

    compiled = []
    for row in TABLES["uncompiled"]:
        for name in row["names"].split():
            found = importlib.import_module(f"megatron.core.{row['module']}")
            for part in name.split("."):
                found = getattr(found, part)
            if hasattr(found, "_torchdynamo_orig_callable"):
                compiled.append(f"{row['module']}:{name}")
    assert compiled == []


def test_a_fresh_distributed_optimizer_is_at_step_zero(monkeypatch):
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parameter = torch.nn.Parameter(torch.ones(2))
    inner = torch.optim.AdamW([parameter])
    state = DistributedOptimizer.state_dict(SimpleNamespace(optimizer=inner, grad_scaler=None))
    assert [group["step"] for group in state["optimizer"]["param_groups"]] == [0]
    assert len(inner.state) == 0


def test_the_kernels_that_megatron_lm_imports_at_start_load_without_triton():
    """Megatron-LM 0.16 imports this module in training/initialize.py; it imports triton unasked."""
    from megatron.core.transformer.custom_layers import batch_invariant_kernels as batch_kernels

    assert batch_kernels.is_batch_invariant_mode_enabled() is False
    with pytest.raises(PlatformError) as refused:
        batch_kernels.matmul_persistent(torch.ones(2, 2), torch.ones(2, 2))
    assert str(refused.value) == (
        "MS501 megatron.core.transformer.custom_layers.batch_invariant_kernels.matmul_kernel_persistent is a Triton "
        "kernel, but Triton is not installed\n"
        "  fix: pip install triton, or remove the Megatron option that calls the kernels of this module "
        "(batch_invariant_kernels: --batch-invariant-mode, paged_stash: --moe-paged-stash, ssm: inference of Mamba models)"
    )


def test_a_tuned_kernel_of_a_newer_megatron_loads_without_triton(tmp_path, monkeypatch):
    """Megatron's main branch imports such modules at the start of training."""
    source = """
import triton
import triton.language as tl
from packaging import version

NEW = version.parse(triton.__version__) >= version.parse("3.0.0")
INDEX = tl.int64

@triton.autotune(configs=[triton.Config({"BLOCK": 8}, num_warps=4)], key=["size"])
@triton.heuristics({"EVEN": lambda args: True})
@triton.jit
def add_kernel(pointer, size, BLOCK: tl.constexpr):
    pass
"""
    (tmp_path / "tuned_kernels.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kernels, "UNGUARDED", kernels.UNGUARDED | {"tuned_kernels"})
    monkeypatch.delitem(sys.modules, "tuned_kernels", raising=False)
    from tuned_kernels import NEW, add_kernel

    assert not NEW
    with pytest.raises(PlatformError, match=r"tuned_kernels\.add_kernel is a Triton kernel"):
        add_kernel[(1,)]


def test_the_layers_of_mamba_load_without_triton() -> None:
    """Megatron 0.16 imports its inference kernels at the top of the mixer, and triton unasked."""
    from megatron.core.models.mamba import mamba_layer_specs
    from megatron.core.ssm.mamba_mixer import MambaMixer

    layer = mamba_layer_specs.mamba_stack_spec.submodules.mamba_layer
    assert layer.submodules.mixer.module is MambaMixer


def test_nobody_else_is_told_that_triton_is_there():
    import importlib.util
    import sys

    from megatron.core.transformer.custom_layers import batch_invariant_kernels  # noqa: F401

    assert importlib.util.find_spec("triton") is None
    assert not {"triton", "triton.language"} & sys.modules.keys()


def test_the_kernels_of_megatron_lm_ask_for_no_compiler(tmp_path, monkeypatch):
    """Every Megatron-LM runs this at start and builds nothing; without CUDA_HOME it would end there."""
    import sys

    import megatron

    package = tmp_path / "legacy" / "fused_kernels"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("def load(args):\n    raise TypeError('CUDA_HOME is None')\n")
    monkeypatch.setattr(megatron, "__path__", [*megatron.__path__, str(tmp_path)])
    from megatron.legacy import fused_kernels

    try:
        assert fused_kernels.load(SimpleNamespace(rank=0)) is None
    finally:
        for name in ("megatron.legacy.fused_kernels", "megatron.legacy"):
            del sys.modules[name]


threads_are_counted = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")


@threads_are_counted
def test_a_fourth_cycle_of_model_parallelism_leaves_what_the_second_left(tmp_path):
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        _, second, _, fourth = cycles(4, tensor_parallel=1)
        assert fourth == second
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.mark.long
@threads_are_counted
def test_forty_cycles_of_model_parallelism_on_two_ranks_leave_what_the_second_left(pool):
    for after in pool.call(cycles, 2, 40, 2, plan=mindspeed.plan(platform="cpu")):
        assert after[-1] == after[1]


def test_a_synchronous_save_starts_no_process(tmp_path, monkeypatch):
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from torch.distributed.checkpoint.api import CheckpointException

    def state(value):
        return {"weight": ShardedTensor.from_rank_offsets("weight", torch.full((8,), value))}

    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    monkeypatch.setattr(os, "fork", None)
    others = psutil.Process().children()
    try:
        for value in (1.0, 2.0):
            folder = tmp_path / f"{value}"
            folder.mkdir()
            dist_checkpointing.save(state(value), str(folder))
            assert dist_checkpointing.load(state(0.0), str(folder))["weight"].tolist() == [value] * 8
        assert psutil.Process().children() == others
        (tmp_path / "3.0").mkdir()
        monkeypatch.setattr(os, "fsync", lambda descriptor: os.write(-1, b""))
        with pytest.raises(CheckpointException, match="Worker failure: "):
            dist_checkpointing.save(state(3.0), str(tmp_path / "3.0"))
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a process with its parent on Linux")
def test_a_writer_that_a_killed_rank_has_forked_ends_with_it():
    if version_in(str(probe("cpu").megatron), ">=0.17"):
        pytest.skip("Megatron writes in threads since 0.17")
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    def write_for_ever():
        waiting = SimpleNamespace(put=lambda results: time.sleep(60))
        FileSystemWriterAsync.write_preloaded_data(
            [], 0, (os.devnull, "", ([], [])), results_queue=waiting, count_queue=None, use_fsync=False
        )

    def rank(told):
        writer = forks.Process(target=write_for_ever)
        writer.start()
        while psutil.Process(writer.pid).status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)
        told.send(writer.pid)
        os.kill(os.getpid(), signal.SIGKILL)

    forks = multiprocessing.get_context("fork")
    here, there = forks.Pipe()
    killed = forks.Process(target=rank, args=(there,))
    killed.start()
    writer = psutil.Process(here.recv())
    killed.join()
    try:
        writer.wait(timeout=2)
    finally:
        if writer.is_running():
            writer.kill()


def test_an_optimizer_offloaded_to_the_host_takes_the_step_of_one_on_the_device():
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    starts = [torch.arange(3.0), torch.ones(2, 2)]
    offloaded, plain = ([torch.nn.Parameter(start.cuda()) for start in starts] for _ in range(2))
    adam = torch.optim.AdamW
    hybrid = HybridDeviceOptimizer(offloaded, offload_fraction=0.4, cpu_optimizer_cls=adam, gpu_optimizer_cls=adam, lr=0.1)
    assert (len(hybrid.cpu_optimizers), hybrid.gpu_optimizer is not None) == (1, True)
    reference = adam(plain, lr=0.1)
    for parameter in (*offloaded, *plain):
        parameter.grad = torch.full_like(parameter, 0.5)
    hybrid.step()
    reference.step()
    for parameter, expected in zip(offloaded, plain, strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.long
def test_weights_initialised_on_the_host_are_equal_on_every_layout(pool):
    plan = mindspeed.plan(platform="cpu")
    (whole,) = pool.call(host_weights, 1, 1, plan=plan)
    first, second = pool.call(host_weights, 2, 2, plan=plan)
    assert torch.equal(torch.cat([first, second]), whole)


@pytest.mark.long
def test_several_instances_of_the_distributed_optimizer_overlap_their_reductions(pool):
    pytest.importorskip("einops", reason="Megatron makes the groups of several instances with einops")
    plan = mindspeed.plan(platform="cpu")
    first, second = pool.call(reduced_by_instances, 2, plan=plan)
    assert first == second == [[1.5] * 4] * 2


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")])
def test_gradients_are_scaled_to_the_same_bits_without_a_copy_in_between(dtypes):
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    assert clip_grads.multi_tensor_scale_impl is utils.local_multi_tensor_scale
    source, target = (getattr(torch, name) for name in dtypes)
    given = [torch.randn(shape).to(source) for shape in ((33, 7), (5,), (0,), ())]
    into = [torch.empty_like(tensor, dtype=target) for tensor in given]
    utils.local_multi_tensor_scale(2048, None, [given, into], 0.3)
    assert all(torch.equal(one, (tensor * 0.3).to(target)) for one, tensor in zip(into, given, strict=True))
    with torch.profiler.profile(record_shapes=True) as profile:
        utils.local_multi_tensor_scale(2048, None, [into[:1], into[:1]], 0.7)
    events = profile.key_averages(group_by_input_shape=True)
    assert [event.key for event in events if [33, 7] in event.input_shapes] == ["aten::mul"]
    assert torch.equal(into[0], (given[0] * 0.3).to(target) * 0.7)
