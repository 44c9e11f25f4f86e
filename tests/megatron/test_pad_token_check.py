"""The token that both pads and ends documents: when Megatron goes wrong with it, and who is told."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from mindspeed.cli import main
from mindspeed.megatron.indexed_data import write_indexed
from mindspeed.megatron.pad_token_check import SharedToken, ends_documents, shared_token, warning, warning_of_arguments
from mindspeed.megatron_lm.training_request import read_command_line
from mindspeed.plugins.discovery import discover

END = 5


@pytest.fixture
def tokenizer(tmp_path):
    """A folder of Hugging Face files: ``tokenizer(pad=..., end=...)``."""

    def make(pad="<|end|>", end="<|end|>"):
        folder = tmp_path / "tokenizer"
        folder.mkdir()
        config = {"pad_token": pad, "eos_token": {"content": end}, "added_tokens_decoder": {str(END): {"content": end}}}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return str(folder)

    return make


@pytest.fixture
def data(tmp_path):
    """Indexed data whose documents end with a token: ``data(5)``."""

    def make(last):
        prefix = str(tmp_path / f"data-{last}")
        write_indexed(prefix, [[np.array([1, 2, 3]), np.array([4, last])], [np.array([2, last])]], 100)
        return prefix

    return make


EFFECT = (
    "document ends are then excluded from the loss, and a sample of only document ends makes the gradient norm NaN; use "
    "a tokenizer with a separate padding token, or prepare the data without --append-eod"
)


def test_one_token_for_both_is_read_from_the_tokenizers_files(tokenizer, tmp_path):
    assert shared_token(tokenizer()) == SharedToken("<|end|>", END)
    assert shared_token(tmp_path / "nothing") is None
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{")
    assert shared_token(tmp_path / "tokenizer") is None


def test_two_tokens_are_no_warning(tokenizer, data):
    assert warning(tokenizer(pad="<pad>"), [data(END)], "0.15.3") is None


def test_documents_that_end_with_the_token_are_a_warning(tokenizer, data):
    folder = tokenizer()
    assert warning(folder, [data(END)], "0.15.3") == (
        f"the token <|end|> of {folder} is used both for padding and as the end of documents: {EFFECT}"
    )


def test_documents_that_end_with_other_tokens_are_none(tokenizer, data):
    assert ends_documents(data(7), END) is False
    assert warning(tokenizer(), [data(7)], "0.15.3") is None


def test_data_that_is_not_here_is_a_warning_with_an_if(tokenizer):
    folder = tokenizer()
    what = (
        f"the token <|end|> of {folder} is used both for padding and as the end of documents: if the data was prepared "
        "with --append-eod, "
    )
    assert warning(folder, ["gone"], "0.14.0") == what + EFFECT


@pytest.mark.parametrize(
    ("version", "ambiguous", "warned"), [("0.16.1", False, False), ("0.16.1", True, True), (None, False, False)]
)
def test_a_megatron_that_pads_with_an_id_of_its_own_is_left_alone(tokenizer, data, version, ambiguous, warned):
    assert (warning(tokenizer(), [data(END)], version, ambiguous) is not None) == warned


def test_the_arguments_of_megatron_lm_are_read(tokenizer, data):
    arguments = {"tokenizer_model": tokenizer(), "data_path": ["0.5", data(7), "0.5", data(END)]}
    assert warning_of_arguments(arguments, "0.15.3") is not None
    assert warning_of_arguments(arguments | {"mock_data": True}, "0.15.3") is None
    assert warning_of_arguments({"tokenizer_model": "organization/name"}, "0.15.3") is None


def test_a_command_line_of_megatron_lm_gets_a_note(tokenizer, data):
    line = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer(), "--data-path", data(END)]
    notes = [row.text for row in read_command_line(line, {}, "0.15.3", discover).notes]
    assert [text for text in notes if text.endswith(EFFECT)] == notes[-1:]


def test_checking_a_job_file_warns_for_those_who_train_it_with_megatron_lm(tokenizer, data, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps({"train": {"tokenizer": tokenizer(), "data": data(END)}}))
    done = CliRunner().invoke(main, ["features", "check", "-f", str(job), "--platform", "cpu", "--megatron", "0.15.3"])
    assert done.exit_code == 0, done.output
    assert (
        f"warning      Megatron-LM: the token <|end|> of {tmp_path}/tokenizer is used both for padding and as the end of "
        f"documents: {EFFECT} "
    ) in done.stdout
