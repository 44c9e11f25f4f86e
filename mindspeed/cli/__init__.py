"""The command line: one file per verb, imported when it is used. torch is imported only where a job runs."""

from __future__ import annotations

from typing import Final

import click

from mindspeed._version import __version__
from mindspeed.cli.lazy import Group, Main

VERBS: Final = (
    *("features", "check", "bugs", "run", "pretrain", "report", "compare", "explain", "doctor", "memory", "tune", "profile"),
    *("checkpoint", "lock", "preflight", "data", "ops"),
    *("patches", "schedule", "docs"),
)
"""In the order of the help; each is a command in a module of its name, but for those of `_ELSEWHERE`."""
_ELSEWHERE: Final = {"features": f"{__name__}:features", "preflight": f"{__name__}.lock:preflight"}
DEVELOPER_VERBS: Final = ("patches", "schedule", "docs")

features = Group(
    "features",
    lazy={
        "list": "mindspeed.cli.feature_list:list_features",
        "check": "mindspeed.cli.feature_check:check",
        "plan": "mindspeed.cli.feature_plan:plan",
        "diff": "mindspeed.cli.feature_diff:diff",
        "explain": "mindspeed.cli.feature_explain:explain",
        "graph": "mindspeed.cli.feature_graph:graph",
        "schema": "mindspeed.cli.feature_schema:schema",
        "new": "mindspeed.cli.feature_new:new",
        "test": "mindspeed.cli.feature_test:test",
        "verify": "mindspeed.cli.verify:verify",
        "matrix": "mindspeed.cli.feature_matrix:matrix",
        "bisect": "mindspeed.cli.feature_bisect:bisect",
    },
    help="List, plan, check, explain, verify and write features.",
    epilog="""\b
Environment variables:
  MINDSPEED_FEATURES=a,b         features to switch on; overrides the job file, overridden by the command line
  MINDSPEED_SET='a.x=1;b.y=2'    settings, likewise
  MINDSPEED_WITHOUT=a,b          features to remove; requesting one of them too is a problem
  MINDSPEED_DISABLE=a,b          features to disable in every plan
  MINDSPEED_PLUGINS=none|all|D,D distributions whose features may be loaded  [default: all]
  MINDSPEED_PLATFORM, MINDSPEED_STRICT=1   as --platform and --strict
  MINDSPEED_TRACE=1              print a line to standard error for each step, patch and hook
  MINDSPEED_CACHE=FOLDER         prepared data, built operators, index of packages  [default: the user's cache folder]""",
)

main = Main(
    "mindspeed",
    lazy={verb: _ELSEWHERE.get(verb, f"{__name__}.{verb}:{verb}") for verb in VERBS},
    developer=DEVELOPER_VERBS,
    entry_points="mindspeed.verbs",
    help="Acceleration features for training large models on Megatron, as plugins.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
click.version_option(__version__, prog_name="mindspeed")(main)
