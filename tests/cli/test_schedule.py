"""``mindspeed schedule show``: a schedule as numbers, as a timeline and as a picture."""

import json


def test_json_has_the_operations_and_the_verdict(mindspeed):
    data = json.loads(mindspeed("schedule", "show", "--schedule", "1f1b", "--pp", 2, "--micro-batches", 3, "--json").stdout)
    assert data == {
        "schedule": "1f1b",
        "pp": 2,
        "vpp": 1,
        "micro_batches": 3,
        "placement": "loop",
        "ops": [
            [["F", 0, 0], ["F", 0, 1], ["D", 0, 0], ["F", 0, 2], ["D", 0, 1], ["D", 0, 2]],
            [["F", 0, 0], ["D", 0, 0], ["F", 0, 1], ["D", 0, 1], ["F", 0, 2], ["D", 0, 2]],
        ],
        "cost": {"F": 1.0, "B": 1.0, "W": 1.0, "R": 1.0, "hop": 0.0},
        "makespan": 12.0,
        "period": 12.0,
        "floor": 10.0,
        "bubble": 0.25,
        "span_bubble": [0.25, 0.0],
        "peak": [2, 1],
    }


def test_text_is_a_timeline_with_the_idle_time(mindspeed, tmp_path):
    picture = tmp_path / "plan.svg"
    done = mindspeed("schedule", "show", "--schedule", "zb-v", "--pp", 2, "--micro-batches", 4, "--svg", picture)
    lines = done.stdout.splitlines()
    assert lines[0] == "zb-v: pp 2, vpp 2, 4 micro-batches, placement v"
    assert lines[-4:] == [
        "makespan 25, floor 25, bubble 4.00%",
        "period of steps that overlap 24",
        "idle within each rank's span: 0.00%, 0.00%",
        "activation sets kept at most: 4, 4",
    ]
    assert picture.read_text().count("<title>") == 2 * 2 * 4 * 3


def test_a_recorded_run_is_drawn_beside_the_plan(mindspeed, tmp_path):
    trace = tmp_path / "rank0.jsonl"
    trace.write_text('["F", 0, 0, 0.0, 0.5, 0.0]\n["D", 0, 0, 0.5, 1.0, 0.0]\n')
    done = mindspeed("schedule", "show", "--schedule", "1f1b", "--pp", 1, "--micro-batches", 1, "--trace", trace)
    assert done.stdout.splitlines()[5:7] == ["recorded", f"rank 0   {'F' * 50}{'D' * 50}"]


def test_a_hand_edited_list_that_deadlocks_is_refused(mindspeed, tmp_path):
    made = json.loads(mindspeed("schedule", "show", "--schedule", "1f1b", "--pp", 2, "--micro-batches", 2, "--json").stdout)
    made["ops"][0] = [["F", 0, 0], ["D", 0, 0], ["F", 0, 1], ["D", 0, 1]]
    made["ops"][1] = [["F", 0, 0], ["F", 0, 1], ["D", 0, 0], ["D", 0, 1]]
    file = tmp_path / "edited.json"
    file.write_text(json.dumps(made))
    done = mindspeed("schedule", "show", "--schedule", file)
    assert done.exit_code == 1
    assert "MS650 1f1b: deadlock: rank 0 waits at D(chunk 0, micro-batch 0)" in done.stderr


def test_bad_input_is_refused_in_one_line(mindspeed, tmp_path):
    (tmp_path / "bad.json").write_text('{"pp": 1}')
    for words, text in (
        (("--schedule", "zb-9"), "MS201 there is no schedule zb-9"),
        (("--schedule", "1f1b", "--vpp", 2), "MS650 1f1b: 1f1b needs one chunk per rank, but vpp is 2"),
        (("--schedule", "zb-v", "--vpp", 3), "MS650 zb-v: placement v has two stages on each rank, but vpp is 3"),
        (("--schedule", "1f1b", "--recompute", "least", "--limit", 0), "0 is not in the range x>=1"),
        (("--schedule", "1f1b", "--cost", "1:x"), "--cost or --weights: could not convert string to float: 'x'"),
        (("--schedule", "1f1b", "--weights", "1,2"), "costs of 2 stages are given, but there are 4 stages"),
        (("--schedule", tmp_path / "bad.json"), "not a schedule: KeyError('vpp')"),
        (("--schedule", "no-such.json"), "MS650 no-such.json: No such file or directory"),
    ):
        done = mindspeed("schedule", "show", *words)
        assert done.exit_code in (1, 2)
        assert text in done.stderr


def test_options_are_settings_of_a_feature_and_its_conditions_hold_of_the_sizes(mindspeed):
    for words, text in (
        (
            ("dualpipev", "--micro-batches", 4),
            "MS304 dualpipev: the number of micro-batches per step is 4, but",
        ),
        (("moe-fb-overlap",), "MS304 moe-fb-overlap: moe-fb-overlap pairs passes in Megatron's interleaved schedule"),
        (("zero-bubble", "--vpp", 2, "--limit", 1), "fix: --set zero-bubble.limit=5, or --set zero-bubble.recompute=least"),
        (("dualpipev", "--limit", 3), "MS301 --limit has no effect, because dualpipev has no setting limit"),
        (("fastest", "--vpp", 2, "--limit", 1), "fix: --limit 5"),
    ):
        done = mindspeed("schedule", "show", "--schedule", *words)
        assert done.exit_code == 1
        assert text in done.stderr
    shown = [
        mindspeed("schedule", "show", "--schedule", "zero-bubble", "--vpp", 2, *words).stdout
        for words in (("--limit", 9), ("--set", "zero-bubble.limit=9"), ())
    ]
    assert shown[0] == shown[1] != shown[2]
