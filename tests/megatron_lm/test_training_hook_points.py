"""The hook points on Megatron-LM's training loop, with functions that stand for Megatron-LM's."""

from contextlib import contextmanager

import pytest

from mindspeed.megatron import training_hook_wrappers as wrappers
from mindspeed.megatron.hook_points import PLATFORM_HOOK_POINTS, hook_points_for
from tests.megatron_lm import stub


def test_only_a_plan_for_the_training_loop_has_its_hook_points(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(stub.build(tmp_path)))

    def names(hooks, training):
        patches = [patch for patch in hook_points_for(hooks, [], training) if patch not in PLATFORM_HOOK_POINTS]
        return [patch.target.partition(":")[2] for patch in patches]

    hooks = ["around_train_step", "save_extra", "load_extra", "optimizer_built"]
    loop = ["validate_args", "train_step", "generate_state_dict", "load_checkpoint"]
    assert names(hooks, training=False) == ["get_megatron_optimizer"]
    assert names([], training=True) == ["validate_args"], "the stub reads no YAML and has no checkpoints"
    assert names(hooks, training=True) == ["get_megatron_optimizer", *loop]


@pytest.mark.guards(31)
def test_a_step_runs_inside_what_features_put_around_it(activate, monkeypatch):
    monkeypatch.setattr(wrappers, "_steps_done", lambda: 7)
    order = []

    @contextmanager
    def around(self, state):
        order.append((self.spec.name, state.step, state.chunks, state.optimizer, state.scheduler))
        yield
        order.append(f"{self.spec.name} after")

    activate(first={"around_train_step": around}, second={"around_train_step": around})
    step = wrappers.train_step(lambda *args, **kwargs: order.append((args, kwargs)) or "losses")
    assert step("forward", "data", ["chunk"], "adam", "cosine", "config", iteration=3) == "losses"
    assert order == [
        ("first", 7, ["chunk"], "adam", "cosine"),
        ("second", 7, ["chunk"], "adam", "cosine"),
        (("forward", "data", ["chunk"], "adam", "cosine", "config"), {"iteration": 3}),
        "second after",
        "first after",
    ]


def test_a_save_runs_inside_what_features_put_around_it(activate):
    order = []

    @contextmanager
    def around(self, step):
        order.append(step)
        try:
            yield
        except TimeoutError:
            order.append("failed")
            raise

    def full_disk(iteration, model, **kwargs):
        raise TimeoutError

    activate(first={"around_save": around})
    with pytest.raises(TimeoutError):
        wrappers.save_checkpoint(full_disk)(7, ["chunk"], non_persistent_ckpt=True)
    assert order == [7, "failed"]


def test_what_features_add_to_a_checkpoint_comes_back_to_them(activate):
    back = []
    activate(
        first={
            "save_extra": lambda self, state: {"calls": state.step},
            "load_extra": lambda self, state, data: back.append((state.step, state.optimizer, data)),
        },
        second={"load_extra": lambda self, state, data: back.append("nothing was saved")},
    )
    generate = wrappers.generate_state_dict(lambda args, model, optimizer, scheduler, rng, iteration: {"model": "weights"})
    assert generate(None, ["chunk"], "adam", "cosine", None) == {"model": "weights"}, "this asks for the shape of a checkpoint"
    saved = generate(None, ["chunk"], "adam", "cosine", None, iteration=5)
    assert saved == {"model": "weights", "mindspeed": {"first": {"calls": 5}}}
    read = wrappers.load_base_checkpoint(lambda folder, args: (saved, None, False))
    load = wrappers.load_checkpoint(lambda model, optimizer, scheduler, load_arg="load": (read("ckpt"), (5, 0))[1])
    assert load(["chunk"], "adam", "cosine") == (5, 0)
    assert back == [(5, "adam", {"calls": 5})]


def test_a_checkpoint_of_a_feature_that_is_gone_loads_without_it(activate):
    activate()
    read = wrappers.load_base_checkpoint(lambda folder, args: ({"mindspeed": {"gone": {"calls": 5}}}, None))
    load = wrappers.load_checkpoint(lambda model, optimizer, scheduler: (read("ckpt"), (5, 0))[1])
    assert load(["chunk"], "adam", "cosine") == (5, 0)


def test_wrappers_that_outlive_their_plan_do_what_the_originals_do(monkeypatch):
    monkeypatch.setattr(wrappers, "_steps_done", lambda: 0)
    assert wrappers.validate_args(lambda args, defaults: (args, defaults))("args", {}) == ("args", {})
    assert wrappers.train_step(lambda *args: args)(1, 2, [3], 4, 5) == (1, 2, [3], 4, 5)
    assert wrappers.generate_state_dict(lambda *args: {"model": args[1]})("args", [1], 2, 3, 4) == {"model": [1]}
    assert wrappers.load_checkpoint(lambda *args: args)([1], 2, 3) == ([1], 2, 3)


def test_the_numbers_of_features_join_the_losses_that_megatron_lm_logs(activate, monkeypatch):
    monkeypatch.setattr(wrappers, "_steps_done", lambda: 7)
    monkeypatch.setattr(wrappers, "_as_losses", dict)
    activate(first={"step_metrics": lambda self, state: {"done": state.step}}, quiet={"step_metrics": lambda self: None})
    step = wrappers.train_step(lambda *args: ({"lm loss": 2.5} if args[0] == "logs" else {}, 0))
    assert step("logs", "data", ["chunk"], "adam", "cosine") == ({"lm loss": 2.5, "first.done": 8.0}, 0)
    assert step("first stage", "data", ["chunk"], "adam", "cosine") == ({}, 0)
