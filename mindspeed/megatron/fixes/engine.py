"""The Transformer Engine of a process against that of the plan: never two at once, and none that is dropped silently."""

from __future__ import annotations

from importlib import import_module

from mindspeed.engine.resolution.environment import ENGINE, engine_origin
from mindspeed.job.world import World
from mindspeed.problems import Fix, PlatformError, Problem


def check_engine(world: World) -> None:
    """Import the Transformer Engine whose layers a job builds, and refuse one that the plan does not know.

    Raises PlatformError with MS339.
    """
    planned, replaced = world.is_set("engine_installed"), world.is_set("engine_over_local")
    if replaced and not planned and (found := engine_origin()) is not None:
        text = f"the plan was made without Transformer Engine, but it is installed now: {found}"
        fix = Fix.advise("make the plan again; it then uses Transformer Engine")
        raise PlatformError([Problem("MS339", text, where=found, fix=fix)])
    if planned and not replaced and world.is_set("transformer_engine_layers"):
        _import_engine()


def _import_engine() -> None:
    try:
        import_module(f"{ENGINE}.pytorch")
    except Exception as error:  # a build for another device fails by whatever its libraries raise
        text = "the job builds Transformer Engine's layers, but the installed Transformer Engine cannot be imported"
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        fix = Fix.advise("repair or uninstall Transformer Engine; without it, mindspeed builds compatible layers")
        raise PlatformError([Problem("MS339", text, chain=(cause,), where=engine_origin() or ENGINE, fix=fix)]) from error
