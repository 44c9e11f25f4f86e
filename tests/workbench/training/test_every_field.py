"""Every field of a job is read by the trainer, refused, or told to have no effect."""

import pytest

from mindspeed import registry
from mindspeed.engine.resolution.applied_fixes import JobRequest, applied
from mindspeed.engine.resolution.request import Layer
from mindspeed.job.fields import FIELDS
from mindspeed.workbench.lint.configuration_rules import installed_rules
from mindspeed.workbench.training import configurations
from mindspeed.workbench.training.config import TrainConfig
from mindspeed.workbench.training.planning import RunRequest, plan_run

OF_MACHINES = ("world_size", "ranks_per_node", "platform", "megatron")
OF_CALLS = ("vocab_size", "tied_embeddings", "seq_length", "micro_batch_size", "global_batch_size", "rotary")
"""What the trainer gives to the model and to its batches, which no configuration has."""
MODELS = {"dense": {}, "experts": {"num_experts": 4}}


def planned(world):
    layer = Layer("command line", world={"world_size": 4, **world})
    return plan_run(RunRequest(JobRequest((layer,), registry.probe("cpu")), TrainConfig(), 257))


def other_value(field, present):
    if field.kind is bool:
        return not present
    if field.kind is tuple:
        return ("another",)
    if field.kind is str:
        return next((word for word in field.words if word != present), "another")
    return field.kind(present + 1)


@pytest.mark.budget(9)  # a plan for each of a hundred fields
@pytest.mark.parametrize(
    "model", ["dense", *(pytest.param(name, marks=pytest.mark.long) for name in MODELS if name != "dense")]
)
def test_a_field_changes_what_is_built_or_is_refused_or_listed(model):
    before, problems = planned(MODELS[model])
    assert not problems
    rules = installed_rules(registry.probe("cpu").megatron)
    built = rules.judge(configurations.of_job(before.world, TrainConfig()), {}).built | before.world.known()
    silent = []
    for name, field in FIELDS.items():
        if name in (*OF_MACHINES, *OF_CALLS):
            continue
        present = built.get(name, field.default if field.has_default else 0)
        after, problems = planned({**MODELS[model], name: other_value(field, present)})
        if problems or after is None:
            continue
        changes = [
            [vars_of(one) for one in configurations.of_job(plan.world, TrainConfig())] + [plan.names, plan.overrides]
            for plan in (before, after)
        ]
        listed = any(row.text.startswith(f"{name} has no effect") for row in after.rows)
        if changes[0] == changes[1] and not listed:
            silent.append(name)
    assert silent == []


def vars_of(configuration):
    return configuration.kind, dict(configuration.values), dict(configuration.symbols)


@pytest.mark.parametrize(
    ("world", "message"),
    [
        ({"optimizer": "sgd"}, "optimizer is sgd, but mindspeed pretrain builds a model with adam"),
        ({"num_experts": 4, "dispatcher": "flex"}, "dispatcher is flex, but mindspeed pretrain builds a model with allgather"),
        ({"zero_centered_norm": True}, "zero_centered_norm is True, but mindspeed pretrain does not build such a model"),
        ({"v_head_dim": 8}, "v_head_dim is 8, but mindspeed pretrain does not build such a model"),
    ],
)
def test_a_field_that_is_not_built_is_refused_and_its_fix_mends(world, message):
    layer = Layer("command line", world={"world_size": 1, **world})
    request = RunRequest(JobRequest((layer,), registry.probe("cpu")), TrainConfig(), 257)
    _, problems = plan_run(request)
    assert message in {problem.message for problem in problems}
    for problem in problems:
        request = request._replace(job=applied(problem.fix[0], request.job) or request.job)
    assert plan_run(request)[1] == []
