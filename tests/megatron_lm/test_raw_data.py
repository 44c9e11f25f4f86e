"""Raw text as the data of a command line: what is prepared, what is refused, and what Megatron-LM then reads."""

import json
import os
from shlex import split

import pytest

from mindspeed import registry
from mindspeed.engine.inspection.cli_arguments import surface
from mindspeed.engine.inspection.releases import recorded_releases
from mindspeed.files.indexed_paths import idx_path
from mindspeed.megatron.indexed_data import read_index, write_indexed
from mindspeed.megatron_lm import raw_data
from mindspeed.megatron_lm.raw_data import DATA_OPTIONS, with_prepared_data
from mindspeed.megatron_lm.training_request import read_command_line
from mindspeed.problems import ResolutionError

TOKENIZER = "--tokenizer-type GPT2BPETokenizer --json-keys text"


@pytest.fixture
def corpus(tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_text(
        "".join(json.dumps({"text": f"document {number}", "title": "a", "n": number}) + "\n" for number in range(20))
    )
    return file


def read(line):
    return read_command_line(split(line), {}, "0.16.1", registry.catalog_for)


def notes_of(request):
    return [(row.kind, row.text) for row in request.notes if row.feature == "data"]


def problems_of(line):
    with pytest.raises(ResolutionError) as caught:
        read(line)
    return [(problem.code, problem.message) for problem in caught.value.problems]


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """Only one package of a tokenizer is installed."""
    monkeypatch.setattr(raw_data, "find_spec", {"transformers": True}.get)


@pytest.fixture
def prepared(monkeypatch):
    """What would run in another process is noted, and its result written."""
    calls = []

    def call(function, given, *others):
        calls.append(given)
        write_indexed(given["prefix"], [[[1, 2]]], 100)

    monkeypatch.setattr(raw_data, "call_separately", call)
    return calls


def final(request):
    return with_prepared_data(request.rest, request.given, request.raw, "0.16.1")


@pytest.mark.parametrize("version", recorded_releases("command_line"))
def test_no_option_of_raw_data_is_one_of_megatrons(version):
    assert surface(version).by_option.keys().isdisjoint(DATA_OPTIONS)


def test_raw_text_is_prepared_once_and_takes_its_place(corpus, prepared):
    line = f"--lr 1 --data-path 0.3 {corpus} 0.7 /other --append-eod --workers 3 {TOKENIZER}"
    request = read(line)
    (data,) = request.raw
    assert data.prefix.startswith(f"{corpus.parent}/mindspeed_data/corpus_text_document-")
    assert notes_of(request) == [
        (
            "prepared-first",
            f"--data-path {corpus} is raw text: before training, one process tokenizes the field 'text' of its 1 file into "
            f"{data.prefix}",
        )
    ]
    assert request.rest == tuple(split(f"--lr 1 --data-path 0.3 {corpus} 0.7 /other --tokenizer-type GPT2BPETokenizer"))
    expected = tuple(split(f"--lr 1 --tokenizer-type GPT2BPETokenizer --data-path 0.3 {data.prefix} 0.7 /other"))
    assert final(request) == expected
    (given,) = prepared
    assert given == {
        "files": (str(corpus),),
        "key": "text",
        "prefix": data.prefix,
        "append_eod": True,
        "workers": 3,
        "arguments": list(request.rest),
    }
    again = read(line)
    assert notes_of(again) == [("note", f"--data-path {corpus} is prepared already: training reads {data.prefix}")]
    assert final(again) == expected
    assert len(prepared) == 1


def test_data_of_each_split_is_prepared(corpus, prepared):
    request = read(
        f"--train-data-path {corpus} --valid-data-path {corpus.parent} {TOKENIZER} --output-prefix {corpus.parent}/to/me"
    )
    words = final(request)
    train, valid = (words[words.index(option) + 1] for option in ("--train-data-path", "--valid-data-path"))
    assert train.startswith(f"{corpus.parent}/to/me_text_document-")
    assert idx_path(train).is_file()
    assert idx_path(valid).is_file()


def test_what_decides_the_tokens_decides_the_place(corpus, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("1")
    line = f"--data-path {corpus} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}"

    def prefix(options="--json-keys text"):
        return read(f"{line} {options}").raw[0].prefix

    first = prefix()
    assert prefix("--json-keys text --workers 4 --lr 3") == first
    assert len({first, prefix("--json-keys title"), prefix("--json-keys text --append-eod")}) == 3
    (folder / "model.safetensors").write_text("3")
    assert prefix() == first
    (folder / "tokenizer.json").write_text("2")
    second = prefix()
    os.utime(corpus, ns=(1, 1))
    assert len({first, second, prefix()}) == 3


def test_indexed_data_needs_nothing(corpus, tmp_path):
    prefix = str(tmp_path / "done")
    write_indexed(prefix, [[[1]]], 9)
    request = read(f"--data-path {prefix} {TOKENIZER}")
    assert request.raw == ()
    assert notes_of(request) == [("note", f"--data-path {prefix} is indexed already, and nothing is prepared")]
    assert final(request) == request.rest


def test_without_its_options_nothing_is_raw(corpus):
    line = f"--data-path {corpus} {TOKENIZER.removesuffix(' --json-keys text')}"
    request = read(line)
    assert (request.raw, request.rest) == ((), tuple(split(line)))


def test_data_of_another_machine_is_not_judged(corpus):
    for path in ("/elsewhere/corpus.jsonl", "your data path", "/elsewhere/prefix"):
        assert notes_of(read(f"--data-path {path} {TOKENIZER}")) == []
    assert read(f"--mock-data --data-path {corpus} {TOKENIZER}").raw == ()


def test_what_would_fail_is_refused(corpus, tmp_path):
    (tmp_path / "empty").mkdir()
    assert problems_of(f"--data-path {tmp_path}/none.jsonl {TOKENIZER}") == [("MS601", f"{tmp_path}/none.jsonl does not exist")]
    assert problems_of(f"--data-path {tmp_path}/empty {TOKENIZER}") == [
        ("MS601", f"{tmp_path}/empty contains no raw text: no file of JSON, CSV, text, Parquet or Arrow")
    ]
    assert problems_of(f"--data-path {corpus} --json-keys text") == [
        ("MS601", f"{corpus} is raw text, but there is no --tokenizer-type")
    ]
    assert problems_of(f"--data-path {corpus} --json-keys text --tokenizer-type NullTokenizer") == [
        ("MS601", f"{corpus} is raw text, but NullTokenizer cannot read text")
    ]
    line = f"--data-path {corpus} --json-keys text --tokenizer-type HuggingFaceTokenizer --tokenizer-model /no/model"
    assert problems_of(line) == [("MS601", f"{corpus} is tokenized with --tokenizer-model /no/model, which does not exist")]
    assert problems_of(f"--data-path {corpus} {TOKENIZER} --vocab-file none.json") == [
        ("MS601", f"{corpus} is tokenized with --vocab-file none.json, which does not exist")
    ]
    assert problems_of(f"--data-path {corpus} --json-keys text --tokenizer-type TikTokenizer") == [
        ("MS501", "--tokenizer-type TikTokenizer needs the package tiktoken, which is not installed")
    ]
    assert problems_of(f"--data-path {corpus} {TOKENIZER} --output-prefix {corpus}/x") == [
        ("MS603", f"prepared data cannot be written to {corpus}: {corpus} is not a folder")
    ]
    assert problems_of("--json-keys text title --workers many") == [
        ("MS301", "--json-keys names 2 fields, but data is prepared from the text of one"),
        ("MS301", "--workers is 'many', not a number of processes"),
    ]


@pytest.mark.long
def test_ranks_train_on_the_tokens_of_megatrons_tokenizer(corpus, tmp_path, checkout):
    letters = sorted(set("document\u01200123456789"))
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    mock = [checkout.flags.index(word) for word in ("--mock-data", "--tokenizer-type", "--vocab-size")]
    left_out = {mock[0], mock[1], mock[1] + 1, mock[2], mock[2] + 1}
    checkout.flags = [word for number, word in enumerate(checkout.flags) if number not in left_out] + split(
        f"--tokenizer-type GPT2BPETokenizer --vocab-file {tmp_path}/vocab.json --merge-file {tmp_path}/merges.txt "
        "--legacy-tokenizer --train-iters 2 --split 100,0,0"
    )
    raw = ("--data-path", str(corpus), "--json-keys", "text", "--append-eod")
    first = checkout.adapted(2, *raw).ended_well()
    prefix = max(corpus.parent.glob("mindspeed_data/*.idx")).with_suffix("")
    texts = [f"document {number}".replace(" ", "\u0120") for number in range(20)]
    wanted = [token for text in texts for token in [*(vocabulary[letter] for letter in text), vocabulary["<|endoftext|>"]]]
    index = read_index(str(prefix))
    assert index.read(0, len(index.lengths)).tolist() == wanted
    assert first.log.count(f"mindspeed: tokenizing {corpus} into {prefix}") == 1
    again = checkout.launched(2, (), *raw).ended_well()
    assert "tokenizing" not in again.log
    assert again.steps == first.steps == checkout.adapted(2, "--data-path", str(prefix)).ended_well().steps


def test_raw_text_that_nothing_tokenizes_is_a_warning(corpus):
    assert [(kind, text) for kind, text in notes_of(read(f"--data-path {corpus}")) if kind == "warning"] == [
        ("warning", f"--data-path {corpus} is raw text, which Megatron does not read: add --json-keys text to tokenize it")
    ]


def test_a_field_that_the_first_record_lacks_is_refused_before_the_start(corpus):
    with pytest.raises(ResolutionError) as caught:
        read(f"--data-path {corpus} {TOKENIZER} --json-keys txt")
    assert [(problem.code, problem.fix_text) for problem in caught.value.problems] == [("MS601", "--json-keys text")]
