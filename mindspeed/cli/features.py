"""``mindspeed features``: list, check, plan and verify features."""

from __future__ import annotations

from mindspeed.cli.lazy import LazyGroup

features = LazyGroup(
    "features",
    verbs={
        "list": "mindspeed.cli.feature_list:list_features",
        "check": "mindspeed.cli.feature_check:check",
        "plan": "mindspeed.cli.feature_plan:plan",
        "verify": "mindspeed.cli.verify:verify",
    },
    help="List, check, plan and verify features.",
)
