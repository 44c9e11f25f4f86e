"""The command line: one file per verb, imported when it is used. torch is imported only where a job runs."""

from __future__ import annotations

from typing import Final

import click

from mindspeed._version import __version__
from mindspeed.cli.lazy import Main

VERBS: Final = (
    *("features", "check", "run", "pretrain", "explain", "doctor", "memory", "tune", "profile", "checkpoint"),
    *("lock", "preflight", "data", "ops"),
    *("patches", "schedule", "docs"),
)
"""In the order of the help; each is a command in a module of its name."""
DEVELOPER_VERBS: Final = ("patches", "schedule", "docs")

main = Main(
    "mindspeed",
    lazy={verb: f"{__name__}.{verb}:{verb}" for verb in VERBS},
    developer=DEVELOPER_VERBS,
    entry_points="mindspeed.verbs",
    help="Acceleration features for training large models on Megatron, as plugins.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
click.version_option(__version__, prog_name="mindspeed")(main)
