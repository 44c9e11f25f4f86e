"""Values that a platform has for Megatron-LM's arguments, in processes whose plan was not made from a command line.

A unit test or a script of one's own parses or makes Megatron-LM's arguments itself. What the base plan sets, for example
no fused kernels on the CPU, replaces the defaults there; any other value stays. Megatron-LM is not imported here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from mindspeed.inspection.cli_arguments import surface
from mindspeed.megatron import training_flags as flags
from mindspeed.plugins.patches import Wrap
from mindspeed.runtime import session

Function = Callable[..., Any]

_HERE: Final = "mindspeed.megatron.platform_arguments"
_REASON: Final = "the platform's values replace defaults of Megatron-LM that cannot hold on it"

PLATFORM_HOOK_POINTS: Final = (
    Wrap("megatron.training.arguments:parse_args", f"{_HERE}:parsed_for_platform", _REASON, phase="setup"),
    Wrap("megatron.training.arguments:validate_args", f"{_HERE}:validated_for_platform", _REASON, phase="setup"),
)


def parsed_for_platform(original: Function) -> Function:
    """Wrap ``parse_args``."""

    @functools.wraps(original)
    def parse_args(*args: Any, **kwargs: Any) -> Any:
        parsed = original(*args, **kwargs)
        put_platform_values(parsed)
        return parsed

    return parse_args


def validated_for_platform(original: Function) -> Function:
    """Wrap ``validate_args(args, defaults)``."""

    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        put_platform_values(args)
        return original(args, *rest, **kwargs)

    return validate_args


def put_platform_values(args: Any) -> None:
    """Put the base plan's values where ``args`` has Megatron-LM's default or nothing."""
    active = session.current()
    if active is None:
        return
    values, base = vars(args), {feature.name for feature in active.plan.base}
    known = surface(active.plan.environment.get("megatron", ""))
    for owner, overrides in active.manager.call("megatron_args"):
        for override in overrides if owner in base else ():
            target = flags.target_of(override.argument, values)
            default = known.by_dest[target.dest][0].default if known is not None and target.dest in known.by_dest else None
            if target.dest in values and values[target.dest] in (None, default):
                setattr(args, target.dest, target.as_argument(override.value))
