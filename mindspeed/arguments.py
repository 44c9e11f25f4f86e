"""Old import name; see `mindspeed.legacy.arguments`."""

from mindspeed.legacy.arguments import process_args as process_args

__all__ = ["process_args"]

__path__: list[str] = []  # `mindspeed.legacy.imports` is asked for the names that are not here
