"""The command line in the reader's language: Chinese by the variables of gettext, English without a translation."""

import gettext
import json
import subprocess
import sys
from io import BytesIO, TextIOWrapper

import pytest

from mindspeed.cli.language import DOMAIN, bind_catalogues
from mindspeed.cli.terminal import compact, display_width, shortened, spread, wrapped
from mindspeed.problems import Fix, Problem, Text, localized, on_command_line

VARIABLES = ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")
JOB = ("nano-pipe", "zero-bubble", "--pp", "2", "--platform", "cpu", "--megatron", "0.16.1")


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Bind no catalogue after a test."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    yield
    gettext.textdomain("messages")


@pytest.fixture
def chinese(mindspeed, monkeypatch):
    """Run a command line as ``LANG=zh_CN.UTF-8`` does."""
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    return mindspeed


@pytest.mark.parametrize("variables", [{"LANGUAGE": "zh_CN:en", "LANG": "C"}, {"LC_ALL": "zh_TW.UTF-8"}, {"LC_MESSAGES": "zh"}])
def test_the_variables_of_gettext_choose_the_language(mindspeed, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert "列出已安装的特性，或按词搜索特性" in mindspeed("features", "--help").stdout


@pytest.mark.parametrize("language", ["", "C", "C.UTF-8", "POSIX", "en_US.UTF-8", "de_DE.UTF-8"])
def test_other_languages_get_english(mindspeed, monkeypatch, language):
    monkeypatch.setenv("LANG", language)
    assert mindspeed("features", "--help").stdout.startswith("Usage: mindspeed features [OPTIONS] COMMAND [ARGS]...\n")


def test_help_is_chinese_and_wrapped_by_columns(chinese):
    lines = chinese("memory", "plan", "--help").stdout.splitlines()
    assert lines[:3] == ["用法：mindspeed memory plan [OPTIONS] [NAME]...", "", "  估算每个流水线阶段的峰值内存。"]
    assert {"选项：", "作业：", "作业的大小和模型的形状："} <= set(lines)
    assert "  -h, --help                显示此帮助并退出。" in lines
    assert [line for line in lines if display_width(line) > 80 and "--" not in line] == []


def test_click_says_mistakes_in_chinese(chinese):
    done = chinese("features", "check", "--pp", "x")
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (2, "错误：'--pp' 的值无效：'x' 不是有效的 integer。")


def test_problems_reasons_and_fixes_are_chinese(chinese):
    done = chinese("features", "check", *JOB, "rinf-attention")
    assert done.exit_code == 1
    lines = done.stderr.splitlines()
    assert lines[:3] == [
        "MS201 特性 'rinf-attention' 不存在",
        "  位置：命令行",
        "  修复：是否指 ring-attention 或 hybrid-attention 或 flash-attention？",
    ]
    assert "MS203 nano-pipe 和 zero-bubble 都占用槽位 pipeline-schedule，而该角色只能由一个特性担任" in lines
    assert lines[-5:] == [
        "  原因：nano-pipe：已请求",
        "  原因：zero-bubble：已请求",
        "  位置：mindspeed docs nano-pipe; mindspeed docs zero-bubble",
        "  修复：移除 nano-pipe 或 zero-bubble",
        "3 个问题",
    ]


def test_json_is_the_same_in_every_language(mindspeed, monkeypatch):
    commands = [("features", "check", *JOB, "--json"), ("features", "list", "--json"), ("explain", "MS203", "--json")]
    english = [mindspeed(*command).stdout for command in commands]
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert [mindspeed(*command).stdout for command in commands] == english
    assert all(text.isascii() for text in english)


def test_a_condition_is_chinese_with_its_values(chinese):
    done = chinese("features", "check", "--tp", "3", "--num-attention-heads", "8", "--platform", "cpu", "--megatron", "0.16.1")
    assert "MS304 tensor-parallel：8 个注意力头不能被 tp=3 整除" in done.stderr.splitlines()
    assert "  修复：--tp 2（8 的约数）" in done.stderr.splitlines()


def test_a_plan_is_chinese_and_has_the_same_digest(mindspeed, monkeypatch):
    words = ("features", "plan", "ring-attention", "--cp", "2", "--platform", "cpu", "--megatron", "0.16.1")
    digest = json.loads(mindspeed(*words, "--json").stdout)["plan"]["digest"]
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    lines = mindspeed(*words).stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")][:3] == ["针对", "特性，按激活顺序", "由优化级别 1 加入"]
    assert f"摘要 {digest}" in lines
    assert "  ring-attention    已请求" in lines


def test_the_list_is_chinese_aligned_and_found_by_chinese_words(chinese):
    lines = chinese("features", "list", "重计算").stdout.splitlines()
    assert "内存：重计算、卸载、更小的状态 (5)" in lines
    assert "  norm-recompute          2  在反向中重计算归一化" in lines
    assert lines[-1] == "8 个特性。给出词语可以筛选；--wide 和 --json 显示更多内容。"


def test_doctor_is_chinese(chinese, monkeypatch):
    monkeypatch.setattr("mindspeed.workbench.diagnostics.doctor.probe_torch", lambda: {"version": "2.9.0", "gloo": True})
    lines = chinese("doctor").stdout.splitlines()
    assert "gloo                 可用" in lines
    assert "CUDA 设备            无  [可选]" in lines
    assert "平台                 使用 cpu，除非用 --platform 选择其他平台" in lines


def test_a_code_is_explained_in_chinese(chinese):
    assert (
        chinese("explain", "MS201").stdout
        == "MS201: 请求的特性不存在。消息会给出相近的名称。`mindspeed features list` 列出所有特性。\n"
    )


def test_a_message_without_a_translation_is_english_with_the_paragraph_of_its_code(chinese):
    chinese("--version")
    problem = Problem("MS603", f"{6} bytes are missing", ("a",), ("b",), fix=(Fix.remove_feature("a"), Fix.give_field("tp", 2)))
    assert problem.text(on_command_line.in_language(localized)).splitlines() == [
        "MS603 6 bytes are missing",
        "  说明：保存失败，例如因为磁盘已满。上一个检查点没有改变。请腾出一些空间，然后继续运行。",
        "  原因：b",
        "  修复：移除 a，或 --tp 2",
    ]
    assert problem.text().splitlines()[1:] == ["  because: b", "  fix: remove a, or --tp 2"]


def test_a_cache_that_cannot_be_written_leaves_english(mindspeed, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINDSPEED_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert mindspeed("--help").stdout.startswith("Usage: ")


def test_output_that_cannot_show_chinese_is_english(chinese, monkeypatch):
    monkeypatch.setattr("sys.stdout", TextIOWrapper(BytesIO(), encoding="ascii"))
    bind_catalogues()
    assert gettext.textdomain() == "messages"


def test_the_catalogue_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("MINDSPEED_CACHE", str(tmp_path))
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    bind_catalogues()
    (made,) = tmp_path.rglob("*.mo")
    before = made.stat().st_mtime_ns
    bind_catalogues()
    assert (gettext.textdomain(), made.stat().st_mtime_ns) == (DOMAIN, before)
    assert gettext.gettext("memory") == "内存"


def test_an_english_reader_loads_no_catalogue():
    program = (
        "import sys; from mindspeed.cli.language import bind_catalogues as b; b(); print('mindspeed.files' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    for language in ("C", "en_US.UTF-8"):
        done = subprocess.run(command, env={"LANG": language}, capture_output=True, text=True, check=True)
        assert done.stdout == "False\n"


def test_a_text_is_its_english_sentence_and_remembers_its_template():
    text = Text.of("{name!r} is {{not}} {value:.1f}", name="a", value=2)
    assert text == "'a' is {not} 2.0"
    assert (text.template, text.fields) == ("{name!r} is {{not}} {value:.1f}", {"name!r": "'a'", "value:.1f": "2.0"})
    assert Text.of("{said}, because {reason}", said=text, reason="{b}") == "'a' is {not} 2.0, because {b}"
    assert json.dumps(text) == json.dumps(str(text))


@pytest.mark.parametrize("width", [30, 33, 60])
def test_chinese_lines_fit_and_break_at_no_bracket_or_punctuation(width):
    text = "把序列切分到各 rank（layernorm-1p），并在反向中重计算（见 MS410）。下一句：归一化、激活。"
    assert compact(spread(text)) == text
    lines = wrapped(text, width=width)
    assert max(map(display_width, lines)) <= width
    assert [line for line in lines if line.strip()[0] in "，。：、）" or line[-1] == "（"] == []
    assert display_width(shortened(text, width)) <= width
