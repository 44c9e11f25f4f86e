"""The command line: one file per verb, imported when it is used. torch is imported only where a job runs."""

from __future__ import annotations

import click

from mindspeed._version import __version__
from mindspeed.cli.lazy import Main

main = Main(
    "mindspeed",
    lazy={
        "features": "mindspeed.cli.features:features",
        "pretrain": "mindspeed.cli.pretrain:pretrain",
        "run": "mindspeed.cli.run:run",
        "patches": "mindspeed.cli.patches:patches",
        "ops": "mindspeed.cli.ops:ops",
        "schedule": "mindspeed.cli.schedule:schedule",
        "data": "mindspeed.cli.data:data",
        "profile": "mindspeed.cli.profile:profile",
        "tune": "mindspeed.cli.tune:tune",
        "doctor": "mindspeed.cli.doctor:doctor",
        "checkpoint": "mindspeed.cli.checkpoint:checkpoint",
        "lock": "mindspeed.cli.lock:lock",
        "memory": "mindspeed.cli.memory:memory",
        "preflight": "mindspeed.cli.preflight:preflight",
        "explain": "mindspeed.cli.explain:explain",
        "docs": "mindspeed.cli.docs:docs",
    },
    help="Acceleration features for training large models on Megatron, as plugins.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
click.version_option(__version__, prog_name="mindspeed")(main)
