"""Constraints of the features that recompute a part of each layer."""

from types import SimpleNamespace

import pytest

from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import CATALOG, refusals

pytestmark = pytest.mark.parametrize("name", ["norm-recompute", "activation-recompute"])
CONFIG = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_modules": None,
    "enable_cuda_graph": False,
    "fp8": None,
    "moe_shared_expert_overlap": False,
}


@pytest.mark.parametrize(("count", "pp", "vpp"), [(8, 1, 1), (4, 2, 1), (2, 2, 2)])
def test_a_count_that_a_chunk_has_is_accepted(name, count, pp, vpp):
    assert refusals(name, settings={name: {"num_layers": count}}, pp=pp, vpp=vpp) == []


def test_a_count_that_no_chunk_has_is_refused(name):
    assert refusals(name, settings={name: {"num_layers": 3}}, pp=2, vpp=2) == [
        f"MS304 {name}: num_layers=3 is more than a model chunk has, which is 8 layers / (pp x vpp = 2 x 2) "
        f"| give fewer layers, or drop {name}.num_layers for all of them"
    ]


def ready(name, **config):
    feature = CATALOG.feature(name)
    feature(feature.Args(), World({})).config_ready(SimpleNamespace(**CONFIG | config))


@pytest.mark.parametrize(
    "config", [{}, {"recompute_granularity": "full", "recompute_method": "block"}, {"recompute_granularity": "selective"}]
)
def test_other_recomputation_is_accepted(name, config):
    ready(name, **config)


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, "uniform full recomputation takes every layer"),
        ({"cuda_graph_impl": "local"}, "CUDA graphs keep every storage"),
        ({"enable_cuda_graph": True}, "CUDA graphs keep every storage"),
        ({"fp8": "e4m3"}, "fp8 layers keep other tensors"),
        ({"fp4": "e2m1"}, "fp4 layers keep other tensors"),
        ({"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm runs layers in parts"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(name, config, refusal):
    with pytest.raises(MindSpeedError) as error:
        ready(name, **config)
    assert str(error.value) == f"MS304 {name}: {refusal}\n  fix: remove {name}"
