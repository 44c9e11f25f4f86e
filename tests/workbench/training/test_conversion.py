"""``mindspeed checkpoint convert``: names change, tensors keep every bit, and what is written is whole."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mindspeed.cli import main
from mindspeed.engine.planning.checkpoint_layers import layers_of, model_of
from mindspeed.workbench.training import conversion
from mindspeed.workbench.training.checkpoints import MANIFEST, checkpoint_path, damages, file_sizes, read_manifest
from tests.workbench.training.conftest import MakeRun

NORM = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
MODULE = "decoder.layers.pre_mlp_layernorm.weight"
SHAPES = {
    NORM: (2, 8),
    "decoder.layers.mlp.router.weight": (2, 4, 8),
    "decoder.layers.self_attention.linear_proj.weight": (2, 8, 8),
    "decoder.final_layernorm.weight": (8,),
    f"optimizer.state.exp_avg.{NORM}": (2, 8),
}
STATE = "decoder.layers.self_attention.linear_proj._extra_state/shard_0_2"


def fill(folder: Path, **more: Any) -> None:
    """Write a checkpoint of a MoE model of local layers as Megatron does, with torch's distributed checkpoints."""
    import torch
    from torch.distributed import checkpoint

    torch.manual_seed(1)
    tensors = {key: torch.randn(shape) for key, shape in SHAPES.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".metadata").unlink(missing_ok=True)
    checkpoint.save(tensors | {STATE: [None]} | more, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    torch.save({"iteration": 10}, folder / "common.pt")


def content(folder: Path, *keys: str) -> dict[str, Any]:
    """Read tensors of a checkpoint."""
    import torch
    from torch.distributed import checkpoint

    shapes = {key: SHAPES.get(key.replace(MODULE, NORM)) for key in keys}
    tensors = {key: torch.empty(shape) for key, shape in shapes.items() if shape}
    checkpoint.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def names(folder: Path) -> list[str]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return sorted(FileSystemReader(folder).read_metadata().state_dict_metadata)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The folder in which Megatron-LM has saved one checkpoint."""
    fill(tmp_path / "saved" / "iter_0000010")
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("10")
    return tmp_path / "saved"


def test_a_checkpoint_goes_to_transformer_engines_layers_and_back(source: Path, tmp_path: Path) -> None:
    import torch

    there, back = tmp_path / "there", tmp_path / "back"
    done = invoke("convert", source, there, "--to", "transformer-engine")
    assert done.stdout == f"{there}/iter_0000010: for Transformer Engine's layers\n"
    assert (there / "latest_checkpointed_iteration.txt").read_text() == "10"
    first, second = source / "iter_0000010", there / "iter_0000010"
    states = [f"decoder.layers.pre_mlp_layernorm._extra_state/shard_{layer}_2" for layer in (0, 1)]
    states += ["decoder.final_layernorm._extra_state/shard_0_1", STATE, STATE.replace("_0_2", "_1_2")]
    kept = [key for key in SHAPES if NORM not in key]
    assert names(second) == sorted([*kept, *states, MODULE, f"optimizer.state.exp_avg.{MODULE}"])
    assert list(damages(second)) == []
    invoke("convert", there, back, "--to", "local")
    third = back / "iter_0000010"
    assert names(third) == sorted([*SHAPES, STATE, STATE.replace("_0_2", "_1_2")])
    before, after = content(first, *SHAPES), content(third, *SHAPES)
    engine = content(second, *(key.replace(NORM, MODULE) for key in SHAPES))
    for key in SHAPES:
        assert torch.equal(before[key], after[key]), key
        assert torch.equal(before[key], engine[key.replace(NORM, MODULE)]), key


def test_a_run_is_converted_with_its_job_and_its_manifest(make_run: MakeRun, tmp_path: Path) -> None:
    from mindspeed.engine.resolution.request import Layer

    run, target = make_run(Layer("job file"), steps=(2,)), tmp_path / "converted"
    folder = checkpoint_path(run, 2)
    fill(folder)
    saved = read_manifest(folder)
    (folder / MANIFEST).unlink()
    replace(saved, files=file_sizes(folder)).write(folder)
    found = json.loads(invoke("convert", run, target, "--to", "transformer-engine", "--json").stdout)
    new = checkpoint_path(target, 2)
    assert found == {"checkpoint": str(new), "layers": "transformer-engine"}
    assert (target / "job.yaml").read_bytes() == (run / "job.yaml").read_bytes()
    assert read_manifest(new).files == {name: size for name, size in file_sizes(new).items() if name != MANIFEST}
    assert json.loads(invoke("inspect", target, "--json").stdout)["layers"] == "transformer-engine"
    assert invoke("inspect", run).stdout.splitlines()[1] == "layers      Megatron's local layers, GPTModel"


def test_a_checkpoint_of_megatron_lm_says_its_layers(source: Path) -> None:
    lines = invoke("inspect", source).stdout.splitlines()
    assert lines[0].startswith(f"checkpoint  {source}/iter_0000010, saved ")
    assert lines[1:] == ["layers      Megatron's local layers, GPTModel", "features"]


def test_what_cannot_be_written_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion.pickle, "dump", full)
    done = invoke("convert", source, tmp_path / "there", "--to", "transformer-engine")
    assert (done.exit_code, done.stderr) == (
        1,
        (
            f"MS603 {tmp_path}/there is not writable: No space left on device\n"
            f"  where: {tmp_path}/there\n"
            "  fix: give a writable folder with enough space\n"
        ),
    )
    assert sorted(os.listdir(tmp_path)) == ["saved"]


def test_files_are_copied_where_they_cannot_be_linked(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_disk(*arguments: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(conversion.os, "link", other_disk)
    invoke("convert", source, tmp_path / "there", "--to", "transformer-engine")
    assert list(damages(tmp_path / "there" / "iter_0000010")) == []


def test_what_cannot_be_converted_is_refused_with_the_reason(source: Path, tmp_path: Path) -> None:
    def refusal(*arguments: object) -> str:
        done = invoke("convert", *arguments)
        assert done.exit_code == 1
        return done.stderr

    folder, there = source / "iter_0000010", tmp_path / "there"
    assert refusal(source, there, "--to", "local") == (
        f"MS602 {folder} already contains Megatron's local layers\n  where: {folder}\n  fix: load it without conversion\n"
    )
    there.mkdir()
    assert refusal(source, there, "--to", "transformer-engine") == (
        f"MS602 {there} already exists\n  where: {there}\n  fix: give a folder that does not exist\n"
    )
    there.rmdir()
    import torch

    fill(folder, **{"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg": torch.ones(4)})
    assert refusal(source, there, "--to", "transformer-engine") == (
        f"MS602 {folder} stores optimizer state in buckets, in the parameter order of the layers that saved it\n"
        f"  where: {folder}\n"
        "  fix: save it with --dist-ckpt-optim-fully-reshardable, or with --no-save-optim\n"
    )
    shutil.rmtree(folder)
    (folder / "mp_rank_00").mkdir(parents=True)
    assert refusal(folder, there, "--to", "transformer-engine") == (
        f"MS602 {folder} is not a checkpoint of a transformer in the format torch_dist\n"
        f"  where: {folder}\n  fix: save it with --ckpt-format torch_dist\n"
    )
    assert sorted(os.listdir(tmp_path)) == ["saved"]


def test_a_checkpoint_of_a_hybrid_model_names_its_class(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"decoder.layers.0.mlp decoder.final_norm.weight decoder.final_norm._extra_state")
    assert (model_of(tmp_path), layers_of(tmp_path)) == ("HybridModel", "transformer-engine")
    (tmp_path / ".metadata").write_bytes(b"")
    assert model_of(tmp_path) == ""
