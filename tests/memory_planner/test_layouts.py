"""The search counts the bytes that the planner of memory counts for one plan."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.memory_planner.layouts import LayoutPeaks
from mindspeed.memory_planner.tensors import chunk_tensors
from mindspeed.ops.availability import running
from mindspeed.workbench.tuning.job import SearchJob, make_search
from mindspeed.workbench.tuning.layout_jobs import Feasibility
from mindspeed.workbench.tuning.search import Scores
from mindspeed.workbench.tuning.time import DEFAULTS, Machine

LLAMA: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 512,
    "ffn_hidden_size": 1408,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "vocab_size": 8192,
    "seq_length": 1024,
    "global_batch_size": 32,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "rotary": True,
    "dtype": "bf16",
}
EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 256, "router_topk": 2}


HYBRID = {"num_layers": None, "hybrid_layer_pattern": "*-" * 32, "vpp": 1, "megatron": "0.19.0"}


V_PLACEMENT = {"vpp": 2, "pp": 4, "tied_embeddings": False}


def job_of(*features: str, **world: Any) -> SearchJob:
    settings = {"zero-bubble": {"placement": "v"}} if world.items() >= V_PLACEMENT.items() else {}
    layer = Layer("test", features, world=LLAMA | world, settings=settings)
    return make_search([layer], {}, made_up("cuda", world.get("megatron", "0.16.1")), 16)


@pytest.mark.parametrize(
    ("world", "features"),
    [
        ({}, ()),
        (EXPERTS, ()),
        (HYBRID, ()),
        ({}, ("swap-optimizer",)),
        ({}, ("reuse-fp32-param",)),
        ({}, ("zero-bubble",)),
        (V_PLACEMENT, ("zero-bubble",)),
    ],
    ids=["dense", "experts", "hybrid", "swapped optimizer", "residuals", "schedule", "placement v"],
)
def test_bytes_of_the_search_are_those_of_the_planner(world: dict[str, Any], features: tuple[str, ...]) -> None:
    job, chosen = job_of(*features, **world), random.Random(5)
    question = job.question(Machine(DEFAULTS["cuda"]), float("inf"))
    rules = Feasibility(job.catalog, question.layouts, question.request, running("cuda"))
    scores = Scores(question, job.catalog)
    able = [c for c in question.choices if world is not HYBRID or "adaptive-cp" not in c.features]  # cuda refuses both
    judged = ((choice, *rules.taken(choice)) for choice in chosen.sample(able, 12))
    valid = [(choice, np.flatnonzero(good & question.layouts.whole_batches), active) for choice, good, active in judged]
    assert any(rows.size for _, rows, _ in valid)
    for choice, some, active in valid:
        if not some.size:
            continue
        rows = np.array([chosen.choice(some)])
        (bytes_of_search,) = scores.bytes(choice, rows, active)
        resolved = job.resolved(choice, question.layouts.world(int(rows[0])))
        assert resolved is not None
        assert bytes_of_search == resolved.bytes, (choice, question.layouts.sizes(int(rows[0])))


@pytest.mark.parametrize("layers", [0, 5])
def test_a_search_counts_as_many_layers_with_experts_as_given(layers: int) -> None:
    job = job_of(**EXPERTS, moe_layers=layers, pp=1)
    question = job.question(Machine(DEFAULTS["cuda"]), float("inf"))
    layouts, plain = question.layouts, question.choices[0]
    taken, active = Feasibility(job.catalog, layouts, question.request, running("cuda")).taken(plain)
    rows = np.flatnonzero(taken & layouts.whole_batches)[::7]
    counted = Scores(question, job.catalog).bytes(plain, rows, active)
    planned = [job.resolved(plain, layouts.world(int(row))) for row in rows]
    assert rows.size
    assert list(counted) == [resolved.bytes for resolved in planned if resolved is not None]


def test_features_of_mindspeed_are_asked_for_many_layouts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job, counted = job_of(**EXPERTS), []
    question = job.question(Machine(DEFAULTS["cuda"]), float("inf"))
    rules = Feasibility(job.catalog, question.layouts, question.request, running("cuda"))
    peaks = LayoutPeaks(job.catalog, question.layouts.model, question.layouts.columns)

    def counting(*given: Any, **options: Any) -> Any:
        counted.append(given)
        return chunk_tensors(*given, **options)

    monkeypatch.setattr("mindspeed.memory_planner.layouts.chunk_tensors", counting)
    most = {}
    for choice in question.choices[::5]:
        good, active = rules.taken(choice)
        before = len(counted)
        peaks.of(np.flatnonzero(good), active, choice.settings)
        most[str(choice)] = len(counted) - before
    assert max(most.values()) < 100, most


def halved_in_pipelines(feature: Any, tensors: Any) -> Any:
    split = feature.world.tp > 1 and feature.world.pp > 1
    return tuple(replace(t, bytes=t.bytes // 2) if split else t for t in tensors)


def halved_by_bits(feature: Any, tensors: Any) -> Any:
    return halved_in_pipelines(feature, tensors) if feature.world.tp.bit_length() > 1 else tensors


@pytest.mark.parametrize(("formula", "most"), [(halved_in_pipelines, 20), (halved_by_bits, 40)])
def test_a_formula_need_not_know_that_it_is_asked_for_many_layouts(formula: Any, most: int) -> None:
    job, asked = job_of(), []
    layouts = job.question(Machine(DEFAULTS["cuda"]), float("inf")).layouts
    rows, everywhere = np.arange(len(layouts)), np.ones(len(layouts), dtype=np.bool_)

    class Halving(job.catalog.feature("tflops")):  # type: ignore[misc]
        def saved_tensors(self, tensors: Any) -> Any:
            asked.append(self.world)
            return formula(self, tensors)

    catalog: Any = SimpleNamespace(specs=job.catalog.specs, models=job.catalog.models, feature={"tflops": Halving}.get)
    plain, halved = (
        LayoutPeaks(catalog, layouts.model, layouts.columns).of(rows, {"tflops": active}, {})
        for active in (~everywhere, everywhere)
    )
    has = (layouts.tp > 1) & (layouts.pp > 1)
    assert has.any()
    assert (plain[~has] == halved[~has]).all()
    assert (plain[has] > halved[has]).all()
    assert len(asked) <= most < len(layouts)
