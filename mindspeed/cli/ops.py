"""``mindspeed ops``: the operators of this machine, and the build of those in C++."""

from __future__ import annotations

from mindspeed.cli.lazy import LazyGroup

ops = LazyGroup(
    "ops",
    verbs={
        "list": "mindspeed.cli.ops_list:list_operators",
        "build": "mindspeed.cli.ops_build:build",
    },
    help="List operators with the variant that runs here, and build those in C++.",
)
