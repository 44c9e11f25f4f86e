"""Old import name; see `mindspeed.legacy.arguments`."""

from mindspeed.legacy.arguments import process_args as process_args

__all__ = ["process_args"]


def __getattr__(name: str) -> object:
    from mindspeed.legacy.imports import missing_name

    raise missing_name(__name__, name)
