"""Patches of Megatron's optimizers for features that take main weights or states away. Light, data only."""

from __future__ import annotations

from typing import Final

from mindspeed.plugins.patches import Patch, Phase, Wrap

_OPTIMIZER: Final = "megatron.core.optimizer"
_WRAPPERS: Final = "mindspeed.memory.optimizer_windows"
_STEP: Final = "the inner optimizer is stepped in windows"
_WHOLE: Final = "a checkpoint is Megatron's own, with all main weights and states"

_COPIES: Final[tuple[tuple[str, str, Phase, str], ...]] = (
    ("_copy_main_params_to_model_params", "copy_main_to_model", "step", "each window copies its own main weights"),
    ("_copy_model_params_to_main_params", "loaded", "checkpoint", "main weights are made from those that are loaded"),
)
_TARGETS: Final[tuple[tuple[str, str, Phase, str], ...]] = (
    ("optimizer:MixedPrecisionOptimizer.step_with_ready_grads", "step_with_ready_grads", "step", _STEP),
    ("optimizer:FP32Optimizer.step_with_ready_grads", "step_with_ready_grads", "step", _STEP),
    *(
        (f"{owner}.{method}", wrapper, phase, reason)
        for owner in ("optimizer:Float16OptimizerWithFloat16Params", "distrib_optimizer:DistributedOptimizer")
        for method, wrapper, phase, reason in _COPIES
    ),
    *(
        (f"optimizer:{owner}.{method}", wrapper, "checkpoint", _WHOLE)
        for owner in ("FP32Optimizer", "Float16OptimizerWithFloat16Params")
        for method, wrapper in (("state_dict", "saved"), ("sharded_state_dict", "sharded"), ("load_state_dict", "loaded"))
    ),
    *(
        (f"distrib_optimizer:DistributedOptimizer.{method}", wrapper, "checkpoint", _WHOLE)
        for method, wrapper in (
            ("sharded_state_dict", "sharded"),
            ("load_state_dict", "loaded"),
            ("get_parameter_state_dp_zero", "saved"),
            ("load_parameter_state_from_dp_zero", "loaded"),
        )
    ),
)


def optimizer_patches() -> list[Patch]:
    """Return the wraps of what reads or writes main weights and states. Each optimizer has its own of them."""
    norm = "the norm of the main weights is logged"
    return [
        *(
            Wrap(f"{_OPTIMIZER}.{target}", f"{_WRAPPERS}:{wrapper}", reason, phase=phase, optional=True)
            for target, wrapper, phase, reason in _TARGETS
        ),
        Wrap("megatron.training.utils:calc_params_l2_norm", f"{_WRAPPERS}:norm_of_weights", norm, optional=True),
    ]
