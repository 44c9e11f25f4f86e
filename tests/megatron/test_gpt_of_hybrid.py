"""A checkpoint of a HybridModel is loaded by a GPTModel of the same layers, and refused where there is none."""

from argparse import Namespace
from pathlib import Path

import pytest

from mindspeed.megatron import model_class
from mindspeed.problems import RunError

HYBRID = b"decoder.layers.0.mlp decoder.final_norm.weight decoder.final_norm._extra_state"


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """The arguments in a checkpoint of a Megatron that has HybridModel."""
    from megatron.core import dist_checkpointing

    (tmp_path / ".metadata").write_bytes(HYBRID)
    args = Namespace(hybrid_layer_pattern="*-|*E", num_layers=4)
    monkeypatch.setattr(model_class, "find_spec", lambda name: name)
    monkeypatch.setattr(dist_checkpointing, "load_common_state_dict", lambda folder: {"args": args}, raising=False)
    return args


def test_a_checkpoint_of_pairs_has_a_pattern_that_a_gpt_model_loads(tmp_path: Path, saved: Namespace) -> None:
    job = Namespace(hybrid_layer_pattern=None)
    assert model_class.pattern_for_gpt(tmp_path, job) == "*-|*E"
    assert model_class.pattern_for_gpt(tmp_path, saved) == ""
    (tmp_path / ".metadata").write_bytes(HYBRID.replace(b"norm", b"layernorm"))
    assert model_class.pattern_for_gpt(tmp_path, job) == ""


@pytest.mark.parametrize("pattern", ["M*-", "*-M-", "--**", "*-*", "*-/*-"])
def test_a_pattern_that_no_gpt_model_has_is_refused(tmp_path: Path, saved: Namespace, pattern: str) -> None:
    saved.hybrid_layer_pattern = pattern
    with pytest.raises(RunError) as caught:
        model_class.pattern_for_gpt(tmp_path, Namespace(hybrid_layer_pattern=None))
    assert [str(problem) for problem in caught.value.problems] == [
        f"MS613 the checkpoint contains a HybridModel with the pattern {pattern}, which no GPTModel has\n"
        f"  where: {tmp_path}\n"
        f"  fix: resume with pretrain_hybrid.py and --hybrid-layer-pattern '{pattern}'"
    ]


def test_the_saved_arguments_become_those_of_the_gpt_model(saved: Namespace) -> None:
    content = {"args": saved}
    model_class.as_gpt(content, "*-|*E")
    assert vars(content["args"]) == {"hybrid_layer_pattern": None, "num_layers": 2}
    assert vars(saved) == {"hybrid_layer_pattern": "*-|*E", "num_layers": 4}
