"""mindspeed: acceleration features for training large models on Megatron, as plugins."""

__version__ = "0.1.0"
__all__ = ["activate", "deactivate", "defaults", "plan", "report", "suspended"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from mindspeed import registry

        return getattr(registry, name)
    raise AttributeError(f"module 'mindspeed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
