"""Every trap has a public source, catches the command that it is about, and lets that with its fix pass."""

import pytest

from mindspeed.engine.resolution.environment import made_up
from mindspeed.megatron_lm.given_arguments import given_arguments, surface_or_nearest
from mindspeed.megatron_lm.launched_command import training_commands
from mindspeed.megatron_lm.lint import CheckedJob, checked_plan
from mindspeed.megatron_lm.traps import CONSEQUENCES, known_traps, traps_of
from mindspeed.megatron_lm.upstream.rules import RulesVerdict

PER_TOKEN = "--calculate-per-token-loss --num-experts 8 --moe-aux-loss-coeff 1e-2 --context-parallel-size 2"
Z_LOSS = "--calculate-per-token-loss --num-experts 8 --moe-z-loss-coeff 1e-3 --tensor-model-parallel-size 2"
BIAS = "--num-experts 8 --moe-router-enable-expert-bias --moe-aux-loss-coeff 1e-2"
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

CASES = [
    ("expert-overlap-on-one-queue", "0.16.1", "--overlap-moe-expert-parallel-comm", ONE_QUEUE, True),
    (
        "expert-overlap-on-one-queue",
        "0.16.1",
        "--overlap-moe-expert-parallel-comm",
        {"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        False,
    ),
    ("gradient-overlap-on-one-queue", "0.16.1", "--overlap-grad-reduce", ONE_QUEUE, True),
    ("gradient-overlap-on-one-queue", "0.16.1", "--overlap-grad-reduce --tensor-model-parallel-size 2", ONE_QUEUE, False),
    ("gradient-overlap-on-one-queue", "0.16.1", "--overlap-grad-reduce", {}, False),
    ("router-losses-per-token", "0.16.1", PER_TOKEN, {}, True),
    ("router-losses-per-token", "0.19.0", PER_TOKEN, {}, False),
    ("router-losses-per-token", "0.16.1", PER_TOKEN.replace("--context-parallel-size 2", ""), {}, False),
    ("router-z-loss-per-token", "0.16.1", Z_LOSS, {}, True),
    ("router-z-loss-per-token", "0.19.0", Z_LOSS, {}, False),
    ("auxiliary-loss-of-other-experts-by-bias", "0.16.1", BIAS, {}, True),
    ("auxiliary-loss-of-other-experts-by-bias", "0.16.1", f"{BIAS} --moe-router-load-balancing-type none", {}, False),
    ("auxiliary-loss-of-other-experts-by-groups", "0.16.1", "--moe-router-num-groups 4 --moe-aux-loss-coeff 1e-2", {}, True),
    ("auxiliary-loss-of-other-experts-by-groups", "0.16.1", "--moe-router-num-groups 4", {}, False),
    ("auxiliary-loss-below-the-epsilon", "0.16.1", "--moe-router-score-function sigmoid --moe-aux-loss-coeff 1", {}, True),
    ("auxiliary-loss-below-the-epsilon", "0.16.1", "--moe-router-score-function sigmoid", {}, False),
    ("masks-that-flash-attention-does-not-take", "0.16.1", "--reset-attention-mask --attention-backend flash", {}, True),
    ("masks-that-flash-attention-does-not-take", "0.16.1", "--reset-attention-mask --attention-backend fused", {}, False),
]


@pytest.mark.parametrize(("name", "version", "words", "environ", "caught"), CASES)
def test_a_trap_catches_what_its_source_is_about(name, version, words, environ, caught):
    known = surface_or_nearest(version)
    names = [trap.name for trap in traps_of(given_arguments(words.split(), known), known, environ)]
    assert (name in names) is caught


def test_every_trap_is_tested_both_ways_and_has_a_source():
    for trap in known_traps():
        assert {caught for name, *_, caught in CASES if name == trap.name} == {True, False}
        assert trap.source.startswith("https://github.com/")
        assert trap.consequence in CONSEQUENCES
        known = surface_or_nearest("0.16.1")
        assert all(dest in known.by_dest for names in trap.when for dest in names.split(" * "))


def test_a_plan_warns_of_the_traps_of_its_script():
    script = (
        "export CUDA_DEVICE_MAX_CONNECTIONS=1\ntorchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 2 --hidden-size 64 "
        "--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --overlap-grad-reduce\n"
    )
    (command,) = training_commands(script, "x.sh")
    plan = checked_plan(CheckedJob(command, made_up("cuda", "0.16.1")), RulesVerdict())
    (text,) = [row.text for row in plan.rows if row.kind == "warning" and row.feature == "megatron-lm"]
    assert text.startswith("slow: --overlap-grad-reduce overlaps nothing with CUDA_DEVICE_MAX_CONNECTIONS=1")
    assert text.endswith("fix: unset CUDA_DEVICE_MAX_CONNECTIONS (https://github.com/NVIDIA/Megatron-LM/issues/1468)")
