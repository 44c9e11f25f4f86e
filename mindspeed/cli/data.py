"""``mindspeed data``: text files to the indexed format that Megatron trains on."""

from __future__ import annotations

import click

from mindspeed.cli.lazy import Group
from mindspeed.cli.output import json_option, print_result


@click.group(cls=Group)
def data() -> None:
    """Prepare text for training."""


@data.command()
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    "prefix",
    metavar="PREFIX",
    required=True,
    help="Prefix of the output files PREFIX.bin, PREFIX.idx and PREFIX.json",
)
@click.option(
    "--tokenizer",
    metavar="TOKENIZER.json",
    default="bytes",
    help="Tokenizer file (tokenizer.json)  [default: one token per byte]",
)
@click.option("--overwrite", is_flag=True, help="Replace existing data")
@json_option
def prepare(inputs: tuple[str, ...], prefix: str, tokenizer: str, overwrite: bool) -> None:
    """Convert text files, and the files in folders, to Megatron's indexed format. Each file is one document."""
    from mindspeed.workbench.training.corpus import prepare as prepare_text
    from mindspeed.workbench.training.tokenizer import tokenizer_of

    index = prepare_text(inputs, prefix, tokenizer, overwrite)
    vocabulary = tokenizer_of(prefix).vocab_size
    print_result(
        {"prefix": prefix, "tokens": index.tokens, "sequences": len(index.lengths), "vocab_size": vocabulary},
        [
            f"{prefix}: {index.tokens} tokens of a vocabulary of {vocabulary}",
            f"train on it with: mindspeed pretrain --data {prefix}",
        ],
    )
