"""Choosing a platform, and what each one declares. Nothing here is activated."""

import glob
import subprocess
import sys
from importlib import util

import pytest

import mindspeed
from mindspeed import platforms, registry
from mindspeed.engine.inspection.megatron_copies import megatron_version
from mindspeed.engine.planning.patch_checks import check_patches
from mindspeed.engine.planning.plan import PlannedPatch
from mindspeed.engine.resolution.environment import version_in
from mindspeed.features.device_emulation.base import DeviceEmulation, DeviceEmulationArgs
from mindspeed.megatron.fixes.feature import MegatronFixes, MegatronFixesArgs
from mindspeed.platforms.cpu import CpuPlatform
from mindspeed.plugins import FeatureArgs, World
from mindspeed.problems import PlatformError


@pytest.fixture
def machine(monkeypatch):
    """A function that makes up what this machine has: packages and device nodes."""
    monkeypatch.delenv("MINDSPEED_PLATFORM", raising=False)

    def make(*packages: str, nodes: tuple[str, ...] = ()) -> None:
        monkeypatch.setattr(util, "find_spec", lambda name: object() if name in packages else None)
        monkeypatch.setattr(
            glob, "glob", lambda pattern: [node for node in nodes if node.startswith(pattern.partition("[")[0])]
        )

    return make


def test_a_machine_with_torch_npu_and_a_device_is_npu(machine):
    machine("torch_npu", nodes=("/dev/davinci0", "/dev/nvidia0"))
    assert platforms.detect() == "npu"


def test_torch_npu_without_a_device_is_not_npu(machine):
    machine("torch_npu")
    assert platforms.detect() == "cpu"


def test_a_machine_with_an_nvidia_device_is_cuda(machine):
    machine(nodes=("/dev/nvidia0",))
    assert platforms.detect() == "cuda"


def test_the_environment_variable_decides_before_the_devices(machine, monkeypatch):
    machine("torch_npu", nodes=("/dev/davinci0",))
    monkeypatch.setenv("MINDSPEED_PLATFORM", "cpu")
    assert platforms.detect() == "cpu"


def test_every_platform_has_a_feature_of_its_own_and_what_megatron_needs_everywhere():
    names = {name: [feature.spec.name for feature in registry.base_features(name)] for name in platforms.PLATFORMS}
    everywhere = ["megatron-fixes", "megatron-hook-points", "plan-agreement"]
    assert names == {
        "npu": ["npu-platform", *everywhere],
        "cuda": ["cuda-platform", *everywhere],
        "cpu": ["cpu-platform", "device-emulation", *everywhere],
    }


def test_an_unknown_platform_is_refused():
    with pytest.raises(PlatformError) as caught:
        registry.base_features("tpu")
    assert str(caught.value) == "MS501 unknown platform 'tpu'\n  fix: use one of npu, cuda, cpu"


def test_choosing_a_platform_imports_no_torch():
    code = (
        "import sys; from mindspeed import platforms, registry; platforms.detect()\n"
        "for name in platforms.PLATFORMS:\n"
        "    for feature in registry.base_features(name):\n"
        "        if hasattr(feature, 'patches'): feature(feature.Args(), None).patches()\n"
        "assert not {'torch', 'torch_npu', 'megatron'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cuda_is_not_patched():
    cuda, *_ = registry.base_features("cuda")
    assert [patch.target for patch in cuda(FeatureArgs(), World({})).patches()] == ["mindspeed.platforms:ACTIVE"]


def test_every_target_of_the_base_plan_exists():
    features = (
        CpuPlatform(FeatureArgs(), World({})),
        DeviceEmulation(DeviceEmulationArgs(poison=True, collective_log="log"), World({})),
        MegatronFixes(MegatronFixesArgs(), World({})),
    )
    here = megatron_version() or ""
    planned = [
        PlannedPatch(feature.spec.name, patch, patch.target, ground=True)
        for feature in features
        for patch in feature.patches()
        if patch.when is None or version_in(here, patch.when.megatron or "")
    ]
    assert check_patches(planned) == []


def test_observers_of_a_collective_lie_around_its_fix_in_order():
    emulation = DeviceEmulation(DeviceEmulationArgs(poison=True, collective_log="log"), World({}))
    patches = [*CpuPlatform(FeatureArgs(), World({})).patches(), *emulation.patches()]
    wrappers = [patch.value for patch in patches if patch.target == "torch.distributed.distributed_c10d:isend"]
    assert [wrapper.rpartition(".")[2] for wrapper in wrappers] == [
        "cpu_backend:keep_storage",
        "collectives:counted",
        "collective_log:logged",
        "poison:poisoned",
    ]


def test_a_missing_torch_npu_is_one_clear_problem():
    code = "import mindspeed; mindspeed.activate(mindspeed.plan(platform='npu'))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "MS501 torch_npu cannot be imported: ModuleNotFoundError: No module named 'torch_npu'\n"
        "  fix: install the torch_npu that matches this torch, and source CANN's set_env.sh; or use --platform cpu\n"
    )


def test_a_platform_without_its_device_is_one_clear_problem(monkeypatch):
    import torch

    from mindspeed.platforms import runtime

    monkeypatch.setattr(platforms, "ACTIVE", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(PlatformError) as caught:
        runtime.take_device(0)
    assert str(caught.value) == (
        "MS501 the platform is cuda, but torch finds no such device\n"
        "  fix: --platform cpu, or install a torch that is built for cuda"
    )


def test_torch_compile_knows_the_functions_of_torch_within_a_plan_and_after_it():
    import torch

    def function(x):
        return torch.empty_like(x).fill_(1) + x

    def captures():
        torch._dynamo.reset()
        return torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [2, 2]

    torch._dynamo.trace_rules.clear_lru_cache()
    mindspeed.activate(mindspeed.plan([], platform="cpu"))
    try:
        assert captures()
    finally:
        mindspeed.deactivate()
    assert captures()
