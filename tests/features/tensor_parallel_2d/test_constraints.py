from types import SimpleNamespace

import pytest

from mindspeed.features.tensor_parallel_2d.costs import cheapest_grid, column, layer_numbers, row
from mindspeed.features.tensor_parallel_2d.feature import TensorParallel2D, TensorParallel2DArgs
from mindspeed.features.tensor_parallel_2d.refusals import muon_optimizers, refusing
from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import active, ask, refusals

NAME = "tensor-parallel-2d"
MUON = "Muon supports only weights split along one dimension, but {feature} splits linear layers along both"
AUTO = f"--set {NAME}.x=auto and --set {NAME}.y=auto"
LLAMA_405B = {
    "hidden_size": 16384,
    "ffn_hidden_size": 53248,
    "num_attention_heads": 128,
    "num_query_groups": 8,
    "gated_linear_unit": True,
}


def grid(x: object, y: object) -> dict[str, dict[str, object]]:
    return {NAME: {"x": x, "y": y}}


def test_it_brings_sequence_parallelism():
    assert {NAME, "sequence-parallel", "tensor-parallel"} <= set(active(NAME, tp=4))
    (added,) = [feature for feature in ask(NAME, tp=4).features if feature.name == "sequence-parallel"]
    assert added.why[0].line == (
        f"sequence-parallel: required by {NAME}, because the linear layers of tensor-parallel-2d expect inputs that are "
        f"split along the sequence"
    )


@pytest.mark.parametrize(("x", "y"), [(2, 2), (4, 1), (1, 4), (2, "auto"), ("auto", 4), ("auto", "auto")])
def test_a_grid_of_the_tensor_parallel_size_is_accepted(x: object, y: object):
    assert refusals(NAME, tp=4, settings=grid(x, y)) == []


@pytest.mark.parametrize(("x", "y"), [(2, 3), (3, "auto"), ("auto", 8), (0, 4), (-2, -2)])
def test_a_grid_of_another_size_is_refused(x: object, y: object):
    refused = f"MS304 {NAME}: a grid of x={x} by y={y} does not match tp=4 ranks | {AUTO}"
    assert refusals(NAME, tp=4, settings=grid(x, y)) == [refused]


def test_a_hidden_size_that_y_does_not_divide_is_refused():
    refused = f"MS304 {NAME}: hidden size 66 is not divisible by y=4 of the 1 x 4 grid | {AUTO}"
    assert refusals(NAME, tp=4, hidden_size=66, settings=grid(1, 4)) == [refused]
    assert refusals(NAME, tp=4, hidden_size=66, settings=grid(2, 2)) == []


def test_an_mlp_that_the_ranks_do_not_divide_is_refused():
    text = "MS304 tensor-parallel: ffn_hidden_size=66 is not divisible by tp=4 | --tp 2 (a divisor of 66)"
    assert refusals(NAME, tp=4, ffn_hidden_size=66, settings=grid(2, 2)) == [text]
    assert refusals(NAME, tp=4, ffn_hidden_size=68, settings=grid(2, 2)) == []


def test_one_dimension_is_chosen_where_it_sends_the_least_and_the_plan_says_so():
    (note,) = [row.text for row in ask(NAME, tp=4).rows if row.feature == NAME and "grid" in row.text]
    assert note.startswith("the grid is 4x1, the minimum of 4x1, 2x2, 1x4: a rank sends ")
    assert note.endswith("(1.00)")
    (note,) = [row.text for row in ask(NAME, tp=4, settings=grid(2, 2)).rows if row.feature == NAME and "grid" in row.text]
    assert note.startswith("the grid is 2x2: a rank sends ")


def test_the_plan_says_where_linear_layers_stay_as_they_are():
    def notes(**settings):
        return [row.text for row in ask(NAME, tp=4, settings={NAME: settings}).rows if row.feature == NAME]

    idle = "with y=1 and no overlap every linear layer remains Megatron's; set y or an overlap"
    assert idle in notes()
    assert idle not in notes(x=2, y=2)
    assert idle not in notes(x=4, y=1, overlap_gather=True)


def test_files_of_ranks_are_accepted_with_a_note_and_formats_of_one_dimension_are_refused():
    plan = ask(NAME, tp=4, settings=grid(2, 2), checkpoint_format="torch")
    note = "checkpoints of format torch have a file for each rank of the grid, so only the same x and y load them"
    assert note in [row.text for row in plan.rows if row.feature == NAME]
    (refused,) = refusals(NAME, tp=4, settings=grid(2, 2), checkpoint_format="fsdp_dtensor")
    assert refused.startswith(
        "MS304 tensor-parallel-2d: checkpoint format fsdp_dtensor supports only weights split along one dimension, but "
        "tensor-parallel-2d splits along both unless y=1 | "
    )


def test_a_layer_of_llama_3_405b_on_sixteen_ranks_sends_seven_tenths_in_forward():
    h, ffn, qkv = 16384, 53248, 16384 + 2 * 1024

    def forward(x: int, y: int) -> float:
        layers = column(h, qkv, x, y), row(h, h, x, y), column(h, 2 * ffn, x, y), row(h, ffn, x, y)
        return sum(sent.forward for sent in layers)

    assert forward(8, 2) / forward(16, 1) == pytest.approx(0.70, abs=0.005)
    world = World({"tp": 16, **LLAMA_405B})
    assert cheapest_grid(world) == (8, 2)
    assert layer_numbers(world, 8, 2) < layer_numbers(world, 16, 1)
    assert cheapest_grid(World({"tp": 4, **LLAMA_405B})) == (4, 1)


@pytest.mark.long
def test_a_layer_needs_the_groups_of_its_grid_and_features_that_y_divides(monkeypatch: pytest.MonkeyPatch):
    from mindspeed.features.tensor_parallel_2d import layers as module

    four, feature = SimpleNamespace(size=lambda: 4), SimpleNamespace(grid=None)
    monkeypatch.setattr(module.ms, "active_feature", lambda name: feature)
    with pytest.raises(MindSpeedError) as error:
        module._feature_and_grid(four)
    (problem,) = error.value.problems
    assert (problem.message, problem.fix_text) == (
        f"{NAME}: a layer is built for 4 ranks before the process groups of the grid were created",
        "call Megatron's initialize_model_parallel before building the model",
    )
    feature.grid = SimpleNamespace(ranks=4, y=4)
    assert module._feature_and_grid(four) == (feature, feature.grid)
    module._require_split(64, feature.grid, "an input")
    with pytest.raises(MindSpeedError) as error:
        module._require_split(66, feature.grid, "an input")
    (problem,) = error.value.problems
    assert (problem.message, problem.fix_text) == (
        f"{NAME}: the 66 features of an input are not divisible by y=4",
        f"--set {NAME}.y=N, where N divides 66",
    )


def test_the_cheapest_grid_needs_the_shape_of_the_model():
    feature = TensorParallel2D(TensorParallel2DArgs(), World({"tp": 4}))
    with pytest.raises(MindSpeedError) as error:
        feature.groups_created({"tp": 4}, lambda name: None)
    (problem,) = error.value.problems
    assert problem.message == f"{NAME}: x=auto and y=auto choose the grid by hidden_size, which the plan does not know"
    assert problem.fix_text == f"give hidden_size as an option or in the job file, or --set {NAME}.y=2 (for a fixed grid)"


def test_an_optimizer_that_reads_one_split_dimension_is_refused_when_it_is_built():
    feature = TensorParallel2D(TensorParallel2DArgs(), World({}))
    adam, muon = (SimpleNamespace(config=SimpleNamespace(optimizer=name)) for name in ("adam", "dist_muon"))
    assert [*muon_optimizers(feature, SimpleNamespace(chained_optimizers=[adam]))] == []
    assert [*muon_optimizers(feature, SimpleNamespace(chained_optimizers=[adam, muon]))] == [MUON]
    with pytest.raises(MindSpeedError) as error:
        refusing(lambda: None)()
    assert [str(problem) for problem in error.value.problems] == [
        f"MS304 {NAME}: {MUON}\n  fix: --optimizer adam, or remove {NAME}"
    ]
