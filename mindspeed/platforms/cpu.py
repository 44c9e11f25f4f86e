"""cpu-platform: what ``torch.cuda`` and the nccl backend mean on a machine without an accelerator.

The tables below are the whole list of what is patched; the modules ``cpu_*`` and ``collective_*`` beside
this file hold what is put there. A device tensor is an ordinary CPU tensor, a host tensor one whose storage is marked,
a stream runs in program order, the device random generator is torch's default generator, and nccl is gloo.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from mindspeed.plugins import (
    ArgOverride,
    Category,
    Feature,
    FeatureArgs,
    FeatureSpec,
    GiveField,
    Patch,
    Ref,
    Replace,
    Set,
    World,
    Wrap,
    condition,
    hookimpl,
)

_HERE: Final = "mindspeed.platforms"
_C10D: Final = "torch.distributed.distributed_c10d"

_ARGUMENTS: Final = (
    # (argument of Megatron-LM, value, why its own default cannot hold)
    ("distributed_backend", "gloo", "nccl needs CUDA devices"),
    ("transformer_impl", "local", "Transformer Engine needs CUDA"),
    ("gradient_accumulation_fusion", False, "the fused kernel is Apex's and needs CUDA"),
    ("masked_softmax_fusion", False, "the fused kernel needs CUDA"),
    ("apply_rope_fusion", False, "the fused kernel is Transformer Engine's and needs CUDA"),
    ("dist_ckpt_optim_fully_reshardable", True, "the other format of a distributed optimizer loses the step of torch's Adam"),
    ("persist_layer_norm", False, "the persistent kernel is Apex's and needs CUDA"),
)

_NO_CUDA: Final = "device cuda is the CPU"
_NO_PINNING: Final = "device cuda is the CPU, and no memory is pinned"
_IN_ORDER: Final = "work runs in program order"
_MEMORY: Final = "device memory is the memory of this process"
_SIDES: Final = "host tensors draw from the host's generator, device tensors from the device's"
_COPIED: Final = "device cuda is the CPU; what changes sides is copied"
_GENERATORS: Final = "host and device draw from two generators"
_GLOO: Final = "nccl is served by gloo"
_AUTOCAST: Final = "autocast for cuda is that of the CPU"
_NVTX: Final = "there is no NVTX on the CPU"

_REPLACED: Final[tuple[tuple[str, str, str, str], ...]] = (
    # (module, glue module, why, names: replaced by the function of the same name)
    (
        "torch.cuda",
        "cpu_device",
        "the CPU is the device: one per process, always ready",
        "is_available is_initialized init _lazy_init _lazy_call is_bf16_supported is_current_stream_capturing current_device "
        "set_device device_count get_device_name get_device_capability get_device_properties can_device_access_peer "
        "get_arch_list is_tf32_supported synchronize ipc_collect",
    ),
    (
        "torch.accelerator",
        "cpu_device",
        "a torch built for CUDA names the accelerator that is not there",
        "current_accelerator",
    ),
    (
        "torch.cuda",
        "cpu_device",
        "there is no CUDA library to ask",
        "temperature power_draw utilization clock_rate cudart check_error",
    ),
    (
        "torch.cuda",
        "cpu_streams",
        "work runs in program order, so every stream is the current one",
        "current_stream default_stream set_stream stream",
    ),
    ("torch.cuda.nvtx", "cpu_streams", _NVTX, "range_push range_pop range_start range_end mark range"),
    (
        "torch.cuda.memory",
        "cpu_memory",
        _MEMORY,
        "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_stats reset_peak_memory_stats "
        "reset_max_memory_allocated reset_accumulated_memory_stats empty_cache mem_get_info memory_summary "
        "set_per_process_memory_fraction _snapshot _record_memory_history",
    ),
    ("torch.cuda", "cpu_memory", _MEMORY, "device_memory_used"),
    ("torch.cuda.nccl", "cpu_nccl", _GLOO, "version"),
    (
        "torch.cuda.random",
        "cpu_random",
        "the device generator is torch's default generator, from which every operator on a CPU tensor draws",
        "get_rng_state set_rng_state get_rng_state_all set_rng_state_all manual_seed manual_seed_all seed seed_all "
        "initial_seed",
    ),
    (
        "torch.utils.checkpoint",
        "cpu_random",
        "recomputed dropout must see the device generator's state",
        "_infer_device_type get_device_states",
    ),
    (_C10D, "cpu_backend", _GLOO, "is_nccl_available"),
    (
        "torch.utils._device",
        "cpu_tensors",
        "a default device is recognised by the factory itself, which is wrapped here",
        "_device_constructors",
    ),
)

_SET: Final[tuple[tuple[str, str, str], ...]] = (
    # (target, object under mindspeed.platforms, why)
    ("torch.cuda:device", "cpu_device:device", "a device guard has nothing to switch"),
    ("torch.cuda.streams:Stream", "cpu_streams:Stream", _IN_ORDER),
    ("torch.cuda.streams:ExternalStream", "cpu_streams:Stream", _IN_ORDER),
    ("torch.cuda.streams:Event", "cpu_streams:Event", "an event is the time at which it was recorded"),
    ("torch.cuda:StreamContext", "cpu_streams:StreamContext", _IN_ORDER),
    ("torch.autograd.profiler:emit_nvtx", "cpu_streams:emit_nvtx", _NVTX),
    ("torch.random:default_generator", "cpu_random:HOST", _GENERATORS),
    ("torch.cuda:default_generators", "cpu_random:DEVICE_GENERATORS", _GENERATORS),
    ("torch:Generator", "cpu_random:Generator", "a generator made for device cuda is a CPU generator"),
    ("torch:Tensor.is_cuda", "cpu_host:is_cuda", "a tensor that is not the host's is the device's"),
    *(
        (f"torch.cuda:{name}Tensor", f"cpu_tensors:{name}Tensor", "a device tensor is a CPU tensor")
        for name in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
    ),
)

_NCCL_GROUPS: Final = (f"{_C10D}:ProcessGroupNCCL", "torch.distributed:ProcessGroupNCCL")
_OPTIONS: Final = "scripts make options of NCCL's groups; a torch without CUDA lacks the class"

_WRAPPED: Final[tuple[tuple[str, str, str, str], ...]] = (
    # (module or class prefix, wrapper under mindspeed.platforms, why, names)
    (
        "torch:",
        "cpu_tensors:place",
        _NO_PINNING,
        "arange as_tensor asarray empty empty_like empty_permuted empty_strided eye frombuffer from_numpy full full_like "
        "linspace logspace ones ones_like range scalar_tensor sparse_coo_tensor sparse_csr_tensor tensor tril_indices "
        "triu_indices zeros zeros_like hann_window hamming_window bartlett_window blackman_window kaiser_window",
    ),
    ("torch:", "cpu_random:place_random", _SIDES, "normal rand randint randn randperm"),
    ("torch:", "cpu_random:place_like", _SIDES, "rand_like randint_like randn_like"),
    ("torch:", "cpu_random:draw_from_side", _SIDES, "bernoulli multinomial poisson"),
    (
        "torch:Tensor.",
        "cpu_random:draw_from_side",
        _SIDES,
        "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_ random_ uniform_",
    ),
    (
        "torch:Tensor.",
        "cpu_tensors:place",
        _NO_PINNING,
        "new_empty new_empty_strided new_full new_ones new_tensor new_zeros",
    ),
    ("torch:Tensor.", "cpu_host:keep_side", "a copy of a host tensor is one", "clone float double half bfloat16 __deepcopy__"),
    ("torch:Tensor.", "cpu_tensors:move_tensor", _COPIED, "to"),
    ("torch:Tensor.", "cpu_tensors:move_to_device", _COPIED, "cuda"),
    ("torch:Tensor.", "cpu_tensors:copy_to_host", "a copy to the host stays a copy", "cpu"),
    ("torch:Tensor.", "cpu_tensors:pin", "pinning makes a copy, and there is nothing to pin for", "pin_memory"),
    ("torch:Tensor.", "cpu_tensors:record", _IN_ORDER, "record_stream"),
    ("torch:Tensor.", "cpu_tensors:type_name", "Megatron knows parameters by the name torch.cuda.FloatTensor", "type"),
    ("torch.storage:_StorageBase.", "cpu_tensors:stay", _NO_CUDA, "cuda"),
    ("torch.nn.modules.module:Module.", "cpu_tensors:move_module", _NO_CUDA, "to"),
    ("torch.utils._device:DeviceContext.", "cpu_tensors:place_context", _NO_CUDA, "__init__"),
    (
        "torch.serialization:",
        "cpu_tensors:restore",
        "what was saved on a device is loaded to the CPU",
        "default_restore_location",
    ),
    ("torch.jit._builtins:", "cpu_tensors:find_builtin", "scripted code knows factories by identity", "_find_builtin"),
    ("torch.amp.autocast_mode:autocast.", "cpu_autocast:enter_on_cpu", _AUTOCAST, "__init__"),
    ("torch.amp.autocast_mode:", "cpu_autocast:on_cpu", _AUTOCAST, "custom_fwd custom_bwd"),
    (
        "torch:",
        "cpu_autocast:ask_cpu",
        _AUTOCAST,
        "is_autocast_enabled set_autocast_enabled get_autocast_dtype set_autocast_dtype",
    ),
    ("torch.amp.grad_scaler:GradScaler.", "cpu_autocast:scale_on_cpu", "a scaler for cuda is one for the CPU", "__init__"),
    (f"{_C10D}:", "cpu_backend:use_gloo", _GLOO, "init_process_group new_group"),
    ("torch.distributed.device_mesh:", "cpu_backend:mesh_on_cpu", _NO_CUDA, "init_device_mesh"),
    ("torch.distributed.device_mesh:DeviceMesh.", "cpu_backend:mesh_on_cpu", _NO_CUDA, "__init__"),
    (f"{_C10D}:", "cpu_backend:any_device", "gloo has no device ids", "barrier"),
    (
        f"{_C10D}:",
        "cpu_backend:keep_storage",
        "Megatron frees an activation's storage while gloo still sends it; a detached tensor keeps it alive",
        "isend",
    ),
    (f"{_C10D}:", "cpu_backend:gather_uneven", "nccl gathers parts of different shapes, gloo does not", "all_gather"),
    (f"{_C10D}:", "cpu_backend:exchange_uneven", "nccl exchanges parts of different shapes, gloo does not", "all_to_all"),
    (
        f"{_C10D}:",
        "cpu_reduce_scatter:scatter_parts",
        "gloo's reduce-scatter sends twice the bytes that it must, and takes no parts of different shapes",
        "reduce_scatter reduce_scatter_tensor _reduce_scatter_base",
    ),
    (
        f"{_C10D}:",
        "cpu_backend:gather_by_size",
        "nccl asks for the right number of elements, gloo also for fitting shapes",
        "all_gather_into_tensor _all_gather_base",
    ),
    (
        f"{_C10D}:",
        "cpu_backend:premultiply",
        "gloo has no sum of scaled parts",
        "all_reduce reduce reduce_scatter reduce_scatter_tensor _reduce_scatter_base",
    ),
    (
        f"{_C10D}:",
        "cpu_reduce_scatter:coalesce",
        "gloo's reduce-scatter sends twice the bytes that it must",
        "_coalescing_manager",
    ),
    (
        "torch.utils.cpp_extension:",
        "cpu_device:refuse_cuda_sources",
        "Megatron compiles CUDA sources when it is imported, and goes on without them",
        "load_inline",
    ),
    ("multiprocessing.spawn:", "children:bring_plan", "a spawned process gets the platform too", "get_preparation_data"),
)
COLLECTIVES: Final = tuple(
    name
    for names in (
        "broadcast all_reduce reduce all_gather all_gather_into_tensor _all_gather_base gather scatter reduce_scatter",
        "reduce_scatter_tensor _reduce_scatter_base all_to_all all_to_all_single send recv isend irecv",
    )
    for name in names.split()
)
"""Functions of torch.distributed that move tensors."""


@condition(
    "the layers on the CPU are local, and their norm is torch's LayerNorm, which has no zero-centered weight",
    fix=(GiveField("zero_centered_norm", False), GiveField("normalization", "RMSNorm")),
)
def norm_is_not_zero_centered(args: Any, world: World) -> bool:
    """Check that a LayerNorm does not have zero-centered weights."""
    return not world.is_set("zero_centered_norm") or world.normalization != "LayerNorm"


class CpuPlatform(Feature[FeatureArgs]):
    """Run code written for CUDA and NCCL on the CPU with gloo."""

    spec = FeatureSpec(
        name="cpu-platform",
        category=Category.PLATFORM,
        level=0,
        platforms={"cpu"},
        constraints=(norm_is_not_zero_centered,),
    )

    _prints_crashes = False

    @hookimpl
    def megatron_args(self) -> list[ArgOverride]:
        return [ArgOverride(argument, value, reason) for argument, value, reason in _ARGUMENTS]

    @hookimpl
    def patches(self) -> list[Patch]:
        patches: list[Patch] = [Set(f"{_HERE}:ACTIVE", "cpu", "one platform is active per process", phase="setup")]
        for module, glue, reason, names in _REPLACED:
            patches += (Replace(f"{module}:{name}", f"{_HERE}.{glue}:{name}", reason) for name in names.split())
        patches.append(Set("torch.cuda:_initialized", True, "the CPU is always ready"))
        patches += (Set(target, Ref(f"{_HERE}.{value}"), reason) for target, value, reason in _SET)
        patches += (Set(target, Ref(f"{_HERE}.cpu_nccl:ProcessGroupNCCL"), _OPTIONS, optional=True) for target in _NCCL_GROUPS)
        for prefix, wrapper, reason, names in _WRAPPED:
            patches += _wraps(prefix, wrapper, reason, names.split())
        counts = "proofs count the bytes of every collective"
        return patches + _wraps(f"{_C10D}:", "collectives:counted", counts, COLLECTIVES)

    @hookimpl
    def activated(self) -> None:
        if sys.__stderr__ is not None and not faulthandler.is_enabled():
            with suppress(OSError, ValueError, RuntimeError):  # a stream without a file
                faulthandler.enable(sys.__stderr__)  # who reads a storage that is away ends the process: Python prints the line
            self._prints_crashes = faulthandler.is_enabled()

    @hookimpl
    def deactivated(self) -> None:
        if self._prints_crashes:
            faulthandler.disable()
            self._prints_crashes = False


def _wraps(prefix: str, wrapper: str, reason: str, names: Iterable[str]) -> list[Patch]:
    return [Wrap(f"{prefix}{name}", f"{_HERE}.{wrapper}", reason) for name in names]
