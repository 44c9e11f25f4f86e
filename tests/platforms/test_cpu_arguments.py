"""Defaults of Megatron-LM's arguments on the CPU, for whoever calls its parser."""

from __future__ import annotations

from argparse import Namespace

import pytest

import mindspeed
from mindspeed.inspection.cli_arguments import surface
from mindspeed.platforms import cpu_arguments
from mindspeed.resolution.environment import made_up
from tests.megatron_lm import stub


@pytest.fixture(autouse=True)
def megatron(monkeypatch):
    monkeypatch.setattr("mindspeed.inspection.megatron_copies.megatron_version", lambda: "0.16.1")


def parsed(**values):
    return Namespace(**{name: rows[0].default for name, rows in surface("0.16.1").by_dest.items()} | values)


def test_defaults_that_need_cuda_have_the_values_of_the_cpu():
    args = cpu_arguments.with_defaults(lambda: parsed())()
    assert (args.apply_rope_fusion, args.no_persist_layer_norm, args.transformer_impl) == (False, True, "local")
    assert (args.distributed_backend, args.gradient_accumulation_fusion, args.masked_softmax_fusion) == ("gloo", False, False)


def test_a_value_that_is_given_stays():
    args = cpu_arguments.with_defaults(lambda: parsed(transformer_impl="inference_optimized"))()
    assert args.transformer_impl == "inference_optimized"


def test_any_caller_of_the_parser_gets_them_where_there_is_a_megatron_lm(tmp_path, monkeypatch):
    def patches():
        plan = mindspeed.plan(level=0, environment=made_up("cpu", "0.16.1"))
        return {planned.patch.target for planned in plan.patches}

    assert "megatron.training.arguments:parse_args" not in patches()
    monkeypatch.syspath_prepend(str(stub.build(tmp_path)))
    assert "megatron.training.arguments:parse_args" in patches()
