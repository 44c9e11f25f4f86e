"""Options for fields of Megatron's configuration that Megatron-LM's parser lacks."""

from dataclasses import fields, replace

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig

from mindspeed import registry
from mindspeed.engine.inspection.cli_arguments import Argument, Surface, surface
from mindspeed.engine.inspection.releases import recorded_releases
from mindspeed.engine.resolution.environment import made_up
from mindspeed.megatron.argument_overrides import unused_overrides
from mindspeed.megatron_lm.given_arguments import FIELD_OPTIONS, field_options_in, with_field_options
from mindspeed.megatron_lm.training_plan import plan_training


@pytest.mark.parametrize("argument", FIELD_OPTIONS, ids=lambda argument: argument.dest)
def test_every_option_has_the_name_of_a_field(argument):
    assert argument.dest in {field.name for field in fields(MLATransformerConfig)}
    assert argument.options == (f"--{argument.dest.replace('_', '-')}",)


def test_a_field_is_a_row_of_the_plan_and_leaves_the_command_line():
    line = ["--num-layers", "2", "--multi-latent-attention", "--beta-fast", "1", "--lr=1"]
    request, plan = plan_training(line, {}, replace(made_up("cpu", "0.16.1"), world_size=1))
    (row,) = [row for row in plan.overrides if row.owners == ("command line",)]
    assert (row.override.argument, row.override.value) == ("beta_fast", 1.0)
    assert request.rest == ("--num-layers", "2", "--multi-latent-attention", "--lr=1")
    _, without = plan_training(line[:3], {}, replace(made_up("cpu", "0.16.1"), world_size=1))
    assert plan.digest != without.digest


def test_the_configuration_takes_the_field_of_the_command_line(monkeypatch):
    monkeypatch.setenv("MINDSPEED_REPORT", "")
    line = ["--num-layers", "2", "--multi-latent-attention", "--beta-fast", "1"]
    _, plan = plan_training(line, {}, replace(registry.probe(), world_size=1))
    registry.activate(plan)
    try:
        config = MLATransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2)
        assert (config.beta_fast, config.beta_slow) == (1.0, 1)
        assert "beta_fast" not in [row.override.argument for row in unused_overrides()]
    finally:
        registry.deactivate()
    assert MLATransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2).beta_fast == 32


def test_an_option_that_megatron_has_stays_megatrons():
    theirs = Argument(("--beta-fast",), "beta_fast", type="int")
    known = with_field_options(Surface("1", (theirs,)))
    assert known.by_option["--beta-fast"] is theirs
    assert [argument.dest for argument in field_options_in(known)] == ["original_max_position_embeddings", "beta_slow"]


def test_no_recorded_megatron_has_the_options_by_another_meaning():
    for version in recorded_releases("command_line"):
        own = surface(version).by_option
        for argument in FIELD_OPTIONS:
            option = own.get(argument.options[0], argument)
            assert (option.dest, option.type) == (argument.dest, argument.type)
