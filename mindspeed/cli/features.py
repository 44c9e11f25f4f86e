"""``mindspeed features``: what there is, what a job would do, whether it is right, and how to make more."""

from __future__ import annotations

from mindspeed.cli.lazy import Group

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
