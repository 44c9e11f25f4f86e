import pytest

from mindspeed.engine.resolution.job_file import load_job_file
from mindspeed.engine.resolution.request import layer_from_environment, parse_assignments
from mindspeed.problems import MindSpeedError, ResolutionError

JOB = """
features: [tensor-parallel]
settings: {tensor-parallel: {size: 2}}
world: {num_layers: 4}
level: 1
platform: npu
strict: true
train: {lr: 0.1}
"""


def write(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def test_a_job_file_is_one_layer_and_a_train_section(tmp_path):
    job = load_job_file(write(tmp_path, JOB))
    assert job.train == {"lr": 0.1}
    layer = job.layer
    assert (layer.source, layer.features, layer.settings) == (
        "job file",
        ("tensor-parallel",),
        {"tensor-parallel": {"size": 2}},
    )
    assert (layer.world, layer.level, layer.platform, layer.strict) == ({"num_layers": 4}, 1, "npu", True)


def test_a_job_file_may_join_the_words_of_a_feature_name_by_underscores(tmp_path):
    text = "features: [ring_attention]\nwithout: [Rms_Norm]\nsettings: {context_parallel: {size: 2}}\n"
    layer = load_job_file(write(tmp_path, text)).layer
    assert (layer.features, layer.without) == (("ring-attention",), ("rms-norm",))
    assert layer.settings == {"context-parallel": {"size": 2}}


def test_settings_of_one_feature_under_two_spellings_are_a_problem(tmp_path):
    text = "settings: {ring-attention: {window: 2}, ring_attention: {keep: half}}\n"
    with pytest.raises(ResolutionError) as caught:
        load_job_file(write(tmp_path, text))
    assert [(p.message, p.fix_text) for p in caught.value.problems] == [
        ("settings has ring-attention twice, once as ring_attention", "put all settings of ring-attention under one key")
    ]


def test_every_mistake_of_a_job_file_is_reported_at_once(tmp_path):
    path = write(tmp_path, "feature: [a]\nsettings: {a: 2}\nlevel: high\nworld: 3\n")
    with pytest.raises(ResolutionError) as caught:
        load_job_file(path)
    assert [(p.code, p.message) for p in caught.value.problems] == [
        ("MS305", "unknown key 'feature' in the job file"),
        ("MS305", "world is 3, not a mapping of world fields"),
        ("MS305", "level is 'high', not 0, 1 or 2"),
        ("MS305", "settings.a is 2, not a mapping of settings"),
    ]
    assert caught.value.problems[0].fix_text == "did you mean features?"
    assert all(p.where == str(path) for p in caught.value.problems)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "\x00"])
def test_a_job_file_that_is_no_mapping_is_a_problem(tmp_path, text):
    with pytest.raises(ResolutionError) as caught:
        load_job_file(write(tmp_path, text))
    assert [p.code for p in caught.value.problems] == ["MS305"]


def test_text_that_is_no_plain_data_is_told_with_its_line_and_a_fix(tmp_path):
    path = write(tmp_path, "world:\n  tp: !!int x\n")
    with pytest.raises(ResolutionError) as caught:
        load_job_file(path)
    assert str(caught.value) == (
        f"MS305 the job file cannot be read: the tag !!int is not plain data\n  where: {path}:2\n"
        "  fix: write plain YAML: names, numbers, lists and mappings (docs/enabling-features.md)"
    )


def test_a_missing_job_file_is_a_problem(tmp_path):
    with pytest.raises(ResolutionError, match="MS305 the job file cannot be opened"):
        load_job_file(tmp_path / "none.yaml")


def test_assignments_are_yaml_scalars():
    given = parse_assignments(["a.size=2", "a.mode=fast", "b.on=true", "b.ratio=0.5"], "--set")
    assert given == {"a": {"size": 2, "mode": "fast"}, "b": {"on": True, "ratio": 0.5}}


def test_every_malformed_assignment_is_named():
    with pytest.raises(MindSpeedError) as caught:
        parse_assignments(["size=2", "a.size", "a.size=3"], "--set")
    assert [p.message for p in caught.value.problems] == [
        "'size=2' does not have the form feature.field=value",
        "'a.size' does not have the form feature.field=value",
    ]


def test_the_environment_is_a_layer():
    layer = layer_from_environment({"MINDSPEED_FEATURES": "a, b", "MINDSPEED_SET": "a.x=1;b.y=z", "MINDSPEED_STRICT": "1"})
    assert (layer.features, layer.settings, layer.strict) == (("a", "b"), {"a": {"x": 1}, "b": {"y": "z"}}, True)
    assert layer_from_environment({}).strict is None
