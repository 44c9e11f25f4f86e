"""Processes that are spawned get the plan of their parent."""

import pickle
import sys
from multiprocessing import spawn
from types import SimpleNamespace

import pytest

import mindspeed
from mindspeed import registry
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.runtime import session
from mindspeed.platforms.children import bring_plan


def test_a_spawned_process_activates_the_plan_on_the_import_path_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = mindspeed.plan(environment=made_up("cpu", "0.16.1"))
    activated: list[tuple[str, str]] = []

    def note(brought: ActivationPlan) -> None:
        activated.append((brought.digest, sys.path[0]))

    surroundings = session.Surroundings(dict, registry.activate_child)
    monkeypatch.setattr(session, "current", lambda: SimpleNamespace(plan=plan, surroundings=surroundings))
    monkeypatch.setattr(registry, "activate", note)
    monkeypatch.setattr(sys, "path", ["a checkout of Megatron-LM", *sys.path])
    sent = pickle.dumps(bring_plan(spawn.get_preparation_data)("child")["mindspeed"])
    monkeypatch.setattr(sys, "path", sys.path[1:])
    pickle.loads(sent)
    assert activated == [(plan.digest, "a checkout of Megatron-LM")]
