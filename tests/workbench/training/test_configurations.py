"""Megatron's rules judge the configurations of a job before it starts, and what is told to be a fix is one."""

import json
import random
from contextlib import nullcontext
from dataclasses import replace
from pkgutil import resolve_name

import pytest
import yaml
from click.testing import CliRunner

from mindspeed import registry
from mindspeed.cli import main
from mindspeed.engine.resolution.applied_fixes import JobRequest
from mindspeed.engine.resolution.request import Layer
from mindspeed.workbench.lint.configuration_rules import installed_rules
from mindspeed.workbench.training import configurations
from mindspeed.workbench.training.config import TrainConfig
from mindspeed.workbench.training.planning import RunRequest, plan_run
from tests.fixes_applied import followed


def request(*features, settings=None, train=None, **world):
    layer = Layer("job file", features=features, settings=settings or {}, world={"world_size": 4, **world})
    return RunRequest(JobRequest((layer,), registry.probe("cpu")), TrainConfig(**train or {}))


EDGES = {
    "experts": [
        {},
        *({"num_experts": n, "router_topk": k} for n in (1, 2, 4) for k in (1, 2, 3)),
        {"num_experts": 4, "expert_capacity_factor": 1.5, "padded_experts": True},
        {"num_experts": 4, "padded_experts": True},
        {"num_experts": 4, "shared_expert_hidden_size": 24, "ep": 2},
    ],
    "attention": [{"num_attention_heads": heads, "num_query_groups": groups} for heads in (1, 3, 4) for groups in (1, 2, 3)],
    "layout": [{}, {"tp": 2}, {"tp": 4}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2}],
    "precision": [{}, {"dtype": "fp16"}, {"dtype": "bf16"}],
}
"""Values of a job that rules of Megatron read: a job has one of each group."""


def worlds():
    pick = random.Random(0)
    return [{name: value for group in EDGES.values() for name, value in pick.choice(group).items()} for _ in range(24)]


@pytest.fixture(scope="module")
def verdicts():
    return [(world, *plan_run(request(**world))) for world in worlds()]


def test_the_rules_refuse_what_megatron_refuses(verdicts):
    rules, refused = installed_rules(registry.probe("cpu").megatron), 0
    for _, plan, _ in verdicts:
        if plan is None:
            continue
        values = {planned.override.argument: planned.override.value for planned in plan.overrides}
        for one in configurations.of_job(plan.world, TrainConfig()):
            verdict = rules.judge([one], values)
            fields = resolve_name(one.kind).__dataclass_fields__
            put = {name: value for name, value in values.items() if name in fields}
            assert not verdict.undecided
            refused += bool(verdict.broken)
            with pytest.raises((ValueError, AssertionError)) if verdict.broken else nullcontext():
                replace(one, values={**one.values, **put}).made()
    assert refused > 2


def test_following_the_fixes_leads_to_a_job_that_starts(verdicts):
    for world, plan, problems in verdicts:
        if plan is not None and problems:
            asked = request(**world)
            outcome = followed(asked.job, lambda job, asked=asked: plan_run(asked._replace(job=job))[1])
            assert outcome.kind == "accepted", outcome.trail


CASES = {
    "one expert per token": ({"num_experts": 4, "router_topk": 1}, {}, "--router-topk 2"),
    "more experts per token than experts": ({"num_experts": 2, "router_topk": 3}, {}, "--router-topk 2, or --num-experts 3"),
    "groups that do not divide heads": (
        {"num_attention_heads": 4, "num_query_groups": 3},
        {},
        "--num-query-groups 2, or --num-query-groups 4",
    ),
    "a module of latent attention": (
        {},
        {"recompute": {"modules": ["core_attn", "mla_up_proj"]}},
        "--set 'recompute.modules=[core_attn]'",
    ),
    "a mode of packed samples": (
        {},
        {"flash-attention": {"sparse_mode": 7}},
        "--set flash-attention.sparse_mode=3, or remove the setting flash-attention.sparse_mode",
    ),
}


@pytest.mark.parametrize("verb", [("pretrain", "--dry-run", "--nproc", "1"), ("check", "--world-size", "1")])
@pytest.mark.parametrize("case", CASES)
def test_what_every_rank_would_refuse_is_refused_with_a_fix_in_the_words_of_the_job(verb, case, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    world, settings, fix = CASES[case]
    file = tmp_path / "job.yaml"
    data = {"features": [*settings], "settings": settings, "world": world, "train": {"run": str(tmp_path / "run")}}
    file.write_text(yaml.safe_dump(data))
    done = CliRunner().invoke(main, [*verb, "--platform", "cpu", "-f", str(file), "--json"], catch_exceptions=False)
    (problem,) = json.loads(done.stdout)["problems"]
    assert problem["fix"] == fix
    mended = [word.strip("'") for word in fix.partition(", or ")[0].split()]
    done = CliRunner().invoke(main, [*verb, "--platform", "cpu", "-f", str(file), *mended, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
