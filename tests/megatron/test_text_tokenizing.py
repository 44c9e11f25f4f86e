"""Raw text as indexed data: the tokens of each document, whoever makes them."""

import json

import pytest

from mindspeed.megatron.indexed_data import read_index
from mindspeed.megatron.text_tokenizing import tokenize
from mindspeed.problems import RunError


class Letters:
    """A tokenizer of letters."""

    vocab_size, eod = 128, 127

    def tokenize(self, text):
        return list(text.encode())


def corpus(folder, texts):
    file = folder / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return [str(file)]


@pytest.mark.parametrize("workers", [1, 2])
def test_each_document_is_one_sequence_that_ends_with_its_end(tmp_path, workers):
    texts = [f"text {number} " * (number % 5) for number in range(200)]
    prefix = str(tmp_path / "made")
    tokenize(Letters(), corpus(tmp_path, texts), "text", prefix, append_eod=True, workers=workers)
    wanted = [[*text.encode(), 127] for text in texts if text]
    index = read_index(prefix)
    assert index.lengths.tolist() == list(map(len, wanted))
    assert index.read(0, len(wanted)).tolist() == [token for document in wanted for token in document]


def test_documents_have_no_end_that_is_not_requested(tmp_path):
    tokenize(Letters(), corpus(tmp_path, ["ab"]), "text", str(tmp_path / "made"))
    assert read_index(str(tmp_path / "made")).read(0, 1).tolist() == [97, 98]


def test_text_without_tokens_is_refused_and_leaves_no_data(tmp_path):
    files = corpus(tmp_path, ["", ""])
    with pytest.raises(RunError) as caught:
        tokenize(Letters(), files, "text", str(tmp_path / "made"))
    assert caught.value.problems[0].message == f"{files[0]} has no text in the field 'text'"
    assert not list(tmp_path.glob("made*"))
