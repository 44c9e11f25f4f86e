"""mindspeed: acceleration features for training large models on Megatron, as plugins."""

import sys

from mindspeed._version import __version__

__all__ = ["__version__", "activate", "deactivate", "defaults", "plan", "report", "suspended"]


class _OldNames:
    """Asked about modules of this package that nothing else has found: says what takes the place of MindSpeed's old ones."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.startswith("mindspeed."):
            from mindspeed.legacy.imports import explain

            if (error := explain(name)) is not None:
                raise error


sys.meta_path.append(_OldNames())


def __getattr__(name: str) -> object:
    if name in __all__:
        from mindspeed import registry

        return getattr(registry, name)
    raise AttributeError(f"module 'mindspeed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
