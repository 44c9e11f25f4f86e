"""Flags that stand for no feature: each is translated, not needed, left out, or refused with its reason."""

import os
from collections.abc import Collection
from pathlib import Path

import pytest

from mindspeed.compat.old_flags.flags import BY_FLAG, MEGATRON_VALUES, read_old_flags
from mindspeed.compat.old_flags.model_arguments import RULES
from mindspeed.compat.old_flags.other_flags import flag_groups, refused_program, translate_others
from mindspeed.engine.inspection.cli_arguments import surface
from mindspeed.engine.inspection.releases import recorded_releases
from mindspeed.megatron_lm.argument_words import ArgumentWords
from mindspeed.megatron_lm.given_arguments import surface_or_nearest
from mindspeed.megatron_lm.training_request import OWN_FLAGS
from mindspeed.registry import catalog
from tools.docs.migration_guide import described_flags
from tools.registered_flags import registered_flags

KNOWN = frozenset(surface_or_nearest("0.16.1").by_option)


def words_of(words: list[str], known: Collection[str]) -> ArgumentWords:
    made = ArgumentWords(words, known)
    translate_others(made)
    return made


def translated(line: str) -> tuple[str, list[str]]:
    made = words_of(line.split(), KNOWN)
    assert (made.problems, made.left_out) == ([], [])
    return " ".join(made.words), made.notes


def test_no_flag_has_two_rows_and_none_is_megatrons_own():
    names = [flag for flag, _ in described_flags()]
    assert len(names) == len(set(names))
    assert not set(names) & BY_FLAG.keys()
    assert not set(names) & surface("0.16.1").by_option.keys()


def test_flags_of_high_availability_are_left_out_with_their_reason():
    flags = (
        "--enable-high-availability --enable-hbmfault-repair --enable-worker-reboot --distributed-optimizer-no-replica "
        "--enable-elastic-training --enable-optimizer-state-local-copy"
    )
    made = words_of([*flags.split(), "--lr", "1"], KNOWN)
    assert (made.words, made.problems) == (["--lr", "1"], [])
    (left,) = made.left_out
    assert left.message == (
        f"{flags.replace(' ', ', ')} are skipped: mindspeed does not repair a running job from copies of the optimizer state; "
        "start it again, and it continues from its last checkpoint. The feature resiliency with level=restart ends a job that "
        "hangs, so that its launcher starts it again"
    )


def test_norms_of_outputs_belong_to_layers_that_have_them():
    words, notes = translated("--post-norm --lr 1")
    assert words == "--lr 1"
    assert notes == ["--post-norm has no effect: only the layers of gemma2_spec and grok_spec read it in MindSpeed-LLM"]
    made = words_of(["--spec", "mindspeed_llm.tasks.models.spec.grok_spec", "layer_spec", "--post-norm"], KNOWN)
    assert any(problem.message.startswith("--post-norm belongs to MindSpeed-LLM") for problem in made.problems)


def test_every_group_says_why_and_what_megatron_calls_it_exists():
    for group in flag_groups():
        assert bool(group.reason) != (group.kind == "megatron")
        if group.kind == "megatron":
            assert {word for word in group.means.split() if word.startswith("--")} <= KNOWN


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--tokenizer-name-or-path /x --lr 1", "--tokenizer-model /x --lr 1"),
        ("--fix-router", "--moe-router-force-load-balancing"),
        ("--routed-scaling-factor=2.5", "--moe-router-topk-scaling-factor 2.5"),
        (
            "--enable-dsa-indexer --index-topk 64 --transformer-impl local",
            "--experimental-attention-variant dsa --dsa-indexer-topk 64 --transformer-impl transformer_engine "
            "--dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-loss-coeff 1.0",
        ),
        ("--optimizer-selection fused_adamw --lr 1", "--lr 1"),
        ("--compress-dense disable", ""),
        (
            "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path /x",
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-hf-use-fast --tokenizer-model /x",
        ),
        (
            "--tokenizer-type PretrainedFromHF --tokenizer-not-use-fast",
            "--tokenizer-type HuggingFaceTokenizer",
        ),
        (
            "--num-layers 4 --num-experts 8 --first-k-dense-replace 1 --moe-layer-freq 1",
            "--num-layers 4 --num-experts 8 --moe-layer-freq [0]*1+[1]*3",
        ),
        ("--num-layers 4 --num-experts 8 --first-k-dense-replace -1", "--num-layers 4 --num-experts 8 --moe-layer-freq [1]*4"),
        (
            "--num-layers 6 --num-experts 8 --first-k-dense-replace 1 --moe-layer-freq 2",
            "--num-layers 6 --num-experts 8 --moe-layer-freq [0]*1+[0,1,0,1,0]",
        ),
        (
            "--moe-router-load-balancing-type group_limited_greedy --seq-aux",
            "--moe-router-load-balancing-type seq_aux_loss --moe-router-pre-softmax",
        ),
        (
            "--moe-router-load-balancing-type group_limited_greedy --norm-topk-prob --moe-router-topk-scaling-factor 16",
            "--moe-router-load-balancing-type aux_loss",
        ),
        (
            "--moe-router-load-balancing-type softmax_topk --moe-router-topk-scaling-factor 2",
            "--moe-router-load-balancing-type none --moe-router-topk-scaling-factor 2 --moe-router-pre-softmax",
        ),
        (
            "--moe-router-load-balancing-type softmax_topk --moe-router-pre-softmax --lr 1",
            "--moe-router-load-balancing-type none --moe-router-pre-softmax --lr 1",
        ),
        ("--moe-router-load-balancing-type softmax_topk --norm-topk-prob", "--moe-router-load-balancing-type none"),
        ("--moe-router-load-balancing-type softmax_topk --seq-aux --norm-topk-prob", "--moe-router-load-balancing-type none"),
        ("--moe-router-load-balancing-type none --seq-aux", "--moe-router-load-balancing-type seq_aux_loss"),
        ("--moe-router-load-balancing-type noaux_tc --seq-aux", "--moe-router-load-balancing-type seq_aux_loss"),
        ("--moe-router-load-balancing-type aux_loss --seq-aux", "--moe-router-load-balancing-type aux_loss"),
        ("--num-experts 8 --seq-aux", "--num-experts 8"),
        ("--norm-topk-prob --moe-router-pre-softmax", ""),
        (
            "--norm-topk-prob --moe-router-pre-softmax --moe-router-score-function sigmoid",
            "--moe-router-pre-softmax --moe-router-score-function sigmoid",
        ),
        (
            "--multi-latent-attention --rope-scaling-type yarn --rope-scaling-factor 40 --rope-scaling-mscale 1.0 "
            "--rope-scaling-original-max-position-embeddings 4096 --beta-fast 32",
            "--multi-latent-attention --rotary-scaling-factor 40 --mscale 1.0 --original-max-position-embeddings 4096 "
            "--beta-fast 32 --rope-type yarn",
        ),
        (
            "--moe-router-load-balancing-type pai_megatron_aux_loss --moe-router-num-groups 8 --seq-aux --norm-topk-prob",
            "--moe-router-load-balancing-type aux_loss --moe-router-pre-softmax",
        ),
        (
            "--rope-scaling-type llama3 --rope-scaling-factor 8.0 --low-freq-factor 1.0 --high-freq-factor 4.0 "
            "--original-max-position-embeddings 8192",
            "--rope-scaling-factor 8.0 --use-rope-scaling",
        ),
        ("--rope-scaling-type linear --rope-scaling-factor 4.0", "--rotary-seq-len-interpolation-factor 4"),
        ("--num-layer-list 2,3", "--pipeline-model-parallel-layout Ett|tttL"),
        (
            "--pipeline-num-transformer-layers [[0,1],[1,1]*2,[3,0]] --mtp-num-layers 1",
            "--mtp-num-layers 1 --pipeline-model-parallel-layout E|t|t|ttt|t|t|t|mL",
        ),
        ("--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec --lr 1", "--lr 1"),
        ("--swiglu-limit 7.0", "--activation-func-clamp-value 7.0 --no-bias-swiglu-fusion"),
        ("--fix-router -- --fix-router", "--moe-router-force-load-balancing -- --fix-router"),
    ],
)
def test_what_megatron_says_in_other_words_is_translated_with_a_note(line, words):
    rest, notes = translated(line)
    assert rest == words
    assert notes or line.startswith("--compress-dense")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--input-embeds-norm --gelu-tanh",
            (
                "--gelu-tanh, --input-embeds-norm belong to MindSpeed-LLM: it is part of a model of MindSpeed-LLM that "
                "Megatron's GPT does not support"
            ),
        ),
        (
            "--ema-decay 0.9",
            "--ema-decay has no equivalent: mindspeed has no optimizer that keeps a moving average of the weights (EMA)",
        ),
        (
            "--rope-scaling-type llama3 --low-freq-factor 2",
            "--low-freq-factor is 2, but Megatron-LM has no argument for it and uses 1",
        ),
        (
            "--rope-scaling-type yarn",
            (
                "--rope-scaling-type yarn has no equivalent: Megatron-LM supports this scaling only with "
                "--multi-latent-attention"
            ),
        ),
        (
            "--spec mindspeed_llm.tasks.models.spec.gemma2_spec layer_spec",
            "--spec mindspeed_llm.tasks.models.spec.gemma2_spec belongs to MindSpeed-LLM: Megatron's GPT does not have these "
            "layers",
        ),
        ("--num-layer-list a,b", "--num-layer-list is 'a,b', not a list of layer counts"),
        ("--num-layers 4 --first-k-dense-replace x", "--first-k-dense-replace is x, not a whole number"),
        ("--first-k-dense-replace 1", "--first-k-dense-replace needs --num-layers"),
        (
            "--rope-scaling-type linear --rope-scaling-factor 1.5",
            "--rope-scaling-factor of --rope-scaling-type linear is not a whole number",
        ),
        (
            "--rope-scaling-type llama3 --low-freq-factor x",
            "--low-freq-factor is x, but Megatron-LM has no argument for it and uses 1",
        ),
    ],
)
def test_what_changes_the_model_is_refused(line, message):
    made = words_of(line.split(), KNOWN)
    assert [(problem.code, problem.message) for problem in made.problems] == [("MS113", message)]
    assert all(problem.fix_text for problem in made.problems)


def test_what_only_saves_time_is_left_out_and_strict_refuses_it():
    made = words_of(["--optimize-send-recv-comm", "--lr", "1", "--moe-unperm2-mem-optim"], KNOWN)
    assert (made.words, made.problems) == (["--lr", "1"], [])
    assert [problem.message.partition(":")[0] for problem in made.left_out] == [
        "--moe-unperm2-mem-optim is skipped",
        "--optimize-send-recv-comm is skipped",
    ]


def test_raw_text_is_requested_by_the_options_of_megatrons_tool():
    words, notes = translated(
        "--handler-name GeneralPretrainHandler --append-eod --workers 4 --tokenizer-type PretrainedFromHF"
    )
    assert words == (
        "--append-eod --workers 4 --tokenizer-type HuggingFaceTokenizer --tokenizer-hf-use-fast --json-keys text "
        "--tokenizer-hf-include-special-tokens"
    )
    assert notes[1:3] == [
        "--handler-name is translated automatically to --json-keys text: raw text is tokenized before training, once",
        "--tokenizer-hf-include-special-tokens is added, because MindSpeed-LLM tokenizes raw text with them",
    ]
    words, _ = translated("--handler-name GeneralPretrainHandler --json-keys content")
    assert words == "--json-keys content"


def test_samples_that_are_no_documents_are_refused():
    made = words_of(["--handler-name", "AlpacaStyleInstructionHandler"], KNOWN)
    (problem,) = made.problems
    assert (made.words, problem.code) == ([], "MS113")
    assert problem.message == (
        "--handler-name has no equivalent: AlpacaStyleInstructionHandler makes other samples than documents of text, which "
        "only MindSpeed-LLM's programs train on"
    )


def test_weights_that_would_be_converted_never_become_random_ones():
    made = words_of(["--load", "/x", "--enable-hf2mg-convert"], KNOWN)
    assert made.words == ["--load", "/x", "--exit-on-missing-checkpoint"]
    assert made.left_out == []
    assert made.notes == [
        "--enable-hf2mg-convert is not needed: --load with a Hugging Face model loads its weights without a conversion on the "
        "disk; --exit-on-missing-checkpoint is added, so that no run starts with random weights"
    ]


def test_a_flag_that_megatron_has_is_left_to_it():
    made = words_of(["--fix-router"], {"--fix-router"})
    assert made.words == ["--fix-router"]


def test_a_megatron_that_lacks_the_words_is_named():
    (problem,) = words_of(["--fix-router"], ()).problems
    assert problem.message.startswith("--fix-router is --moe-router-force-load-balancing in Megatron-LM, but this version")


@pytest.mark.parametrize(
    ("line", "features", "note"),
    [
        (
            "--use-fused-ring-attention-update",
            (),
            "--use-fused-ring-attention-update has no effect with --context-parallel-size 1",
        ),
        ("--variable-seq-lengths", (), "--variable-seq-lengths has no effect with --pipeline-model-parallel-size 1"),
        (
            "--use-ascend-mc2 --tensor-model-parallel-size 1",
            (),
            "--use-ascend-mc2 has no effect with --tensor-model-parallel-size 1",
        ),
        (
            "--pipeline-model-parallel-size 2 --recompute-in-advance --recompute-granularity full",
            ("recompute-in-advance",),
            "--recompute-in-advance replaces --recompute-granularity: it recomputes every layer",
        ),
        (
            "--num-layers 4 --recompute-norm --recompute-norm-num-layers 9",
            ("norm-recompute",),
            "--recompute-norm-num-layers 9 covers all 4 layers of a model chunk",
        ),
    ],
)
def test_a_flag_with_nothing_to_do_is_a_note(line, features, note):
    old = read_old_flags(line.split(), KNOWN, catalog())
    assert (old.problems, old.layer.features) == ((), features)
    assert note in old.notes


def test_mindspeeds_algorithm_by_default_is_offered_where_none_is_named():
    size = ["--context-parallel-size", "2", "--use-fused-swiglu"]
    assert [name for name, _ in read_old_flags(size, KNOWN, catalog()).fallbacks] == ["ring-attention"]
    for named in (["--context-parallel-algo", "ulysses_cp_algo"], ["--cp-comm-type", "a2a"]):
        assert read_old_flags([*size, *named], KNOWN, catalog()).fallbacks == ()
    assert read_old_flags(size[2:], KNOWN, catalog()).fallbacks == ()
    assert read_old_flags([*size[:2], "--of-the-script"], KNOWN, catalog()).fallbacks == (), "no flag of MindSpeed is there"


def test_programs_of_the_library_are_named():
    assert refused_program("/a/pretrain_gpt.py") is None
    assert refused_program("posttrain_gpt.py").message == (
        "posttrain_gpt.py belongs to MindSpeed-LLM: Megatron-LM has no such program"
    )


@pytest.mark.parametrize("variable", ["MINDSPEED_PATH", "MINDSPEED_LLM_PATH"])
def test_every_flag_that_a_checkout_registers_has_a_row(variable):
    if variable not in os.environ:
        pytest.skip(f"{variable} names no checkout")
    rows = {flag for flag, _ in described_flags()} | BY_FLAG.keys() | OWN_FLAGS.keys() | MEGATRON_VALUES
    rows |= {option for version in recorded_releases("command_line") for option in surface(version).by_option}
    rows |= {flag for rule in RULES for flag in rule.flags}
    registered = registered_flags(Path(os.environ[variable]))
    assert len(registered) > 200
    assert {flag: file for flag, file in registered.items() if flag not in rows} == {}
