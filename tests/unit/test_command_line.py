"""Looking flags up in a command line."""

import pytest

from vllm_kunlun.cli.command_line import CommandLine, flag_name, unknown_flags
from vllm_kunlun.cli.screen import CommandError


@pytest.mark.parametrize(
    ("token", "name"),
    [
        ("--port", "--port"),
        ("--max_num_seqs=8", "--max-num-seqs"),
        ("--compilation-config.pass_config.x=1", "--compilation-config"),
        ("-tp", "-tp"),
        ("-tp=2", "-tp"),
        ("-1", None),
        ("-0.5", None),
        ("--", None),
        ("-", None),
        ("model", None),
        ("./a-b", None),
    ],
)
def test_flag_names_are_normalized(token, name):
    assert flag_name(token) == name


@pytest.mark.parametrize(
    "arguments", [("--max-num-seqs", "8"), ("--max_num_seqs", "8"), ("--max-num-seqs=8",), ("--max_num_seqs=8",)]
)
def test_value_is_found_in_every_spelling(arguments):
    command = CommandLine(("model", *arguments, "--enforce-eager"))
    assert command.has("--max-num-seqs")
    assert command.value("--max-num-seqs") == "8"


def test_last_occurrence_and_short_names_count():
    command = CommandLine(("--tensor-parallel-size", "4", "-tp=2"))
    assert command.value("--tensor-parallel-size", "-tp") == "2"


def test_value_that_equals_a_flag_in_another_place_is_not_found():
    command = CommandLine(("port", "--served-model-name", "port"))
    assert not command.has("--port")
    assert command.value("--port") is None


def test_positional_argument_in_front_is_known():
    assert CommandLine(("model", "--port", "1")).leading_positional() == "model"
    assert CommandLine(("--port", "1")).leading_positional() is None
    assert CommandLine(()).leading_positional() is None
    assert not CommandLine(("--port=1", "--enforce-eager")).may_have_positional()


def test_config_file_counts_where_the_command_line_is_silent(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("port: 9000\nmax_model_len: 512\n")
    command = CommandLine.read(["--config", str(path), "--max-model-len", "64"])
    assert command.has("--port")
    assert command.value("--port") == "9000"
    assert command.value("--max-model-len") == "64"


@pytest.mark.parametrize("content", [None, "- a list\n", "{broken"])
def test_config_file_that_cannot_be_read_is_an_error(tmp_path, content):
    path = tmp_path / "serve.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CommandError, match="--config"):
        CommandLine.read([f"--config={path}"])


def test_unknown_flags_get_the_most_similar_known_ones():
    command = CommandLine(("--max-model-length", "5", "--port", "1", "--tensor-par", "2", "--bogus"))
    known = ["--max-model-len", "--max-num-seqs", "--port", "--uds", "--host", "--tensor-parallel-size"]
    assert unknown_flags(command, known) == {"--max-model-length": ["--max-model-len"], "--bogus": []}
