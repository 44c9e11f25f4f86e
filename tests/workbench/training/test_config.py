import pytest

from mindspeed.cli.pretrain import pretrain
from mindspeed.engine.resolution.setting_validation import accepted_value, flag
from mindspeed.workbench.training.config import TrainConfig, train_config


def test_later_sources_win():
    config, problems = train_config({"job file": {"lr": 0.1, "seed": 7}, "command line": {"lr": 0.2}})
    assert (config.lr, config.seed, problems) == (0.2, 7, [])


def test_every_mistake_is_reported_with_its_source_and_fix():
    given = {"job file": {"train_iter": 3, "lr": "fast"}, "command line": {"seed": -1}}
    _, problems = train_config(given)
    assert sorted(map(str, problems)) == [
        "MS301 train.lr is 'fast': input should be a valid number, unable to parse string as a number\n"
        "  where: job file\n  fix: --lr 0.003",
        "MS301 train.seed is -1: input should be greater than or equal to 0\n  where: command line\n  fix: --seed 1234",
        "MS305 unknown key 'train_iter' in train\n"
        "  where: job file\n  fix: did you mean train_iters or eval_iters or decay_iters?",
    ]


def test_the_fix_of_every_key_is_a_value_that_is_accepted():
    for name, field in TrainConfig.model_fields.items():
        _, problems = train_config({"job file": {name: accepted_value(field)}})
        assert problems == [], name


def test_a_wrong_value_leaves_the_others_as_they_were_given():
    config, _ = train_config({"job file": {"lr": "fast", "seed": 7}})
    assert (config.lr, config.seed) == (TrainConfig.model_fields["lr"].default, 7)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"lr": 1e-4, "min_lr": 1e-3},
            ("MS301 train.min_lr is 0.001, which is greater than train.lr, 0.0001\n  where: job file\n  fix: --min-lr 1e-05"),
        ),
        (
            {"train_iters": 30, "warmup_iters": 30},
            (
                "MS301 train.warmup_iters is 30, but warm-up must end before step 30, where the learning-rate decay ends\n"
                "  where: job file\n  fix: --warmup-iters 3"
            ),
        ),
    ],
)
def test_values_that_do_not_fit_together_are_a_problem(given, text):
    _, problems = train_config({"job file": given})
    assert [str(problem) for problem in problems] == [text]


def test_every_key_is_an_option_with_its_description():
    options = {option: parameter for parameter in pretrain.params for option in parameter.opts}
    for name, field in TrainConfig.model_fields.items():
        assert options[flag(name)].help.startswith(field.description)
