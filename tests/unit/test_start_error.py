"""Short log lines for errors that stop a start."""

import logging
import subprocess
import sys

import pytest

from vllm_kunlun.platforms import start_error
from vllm_kunlun.platforms.start_error import ShortStartErrors, StartError, is_echo, readable, refusal_message


def raised(error, cause=None):
    try:
        raise error from cause
    except type(error) as caught:
        return caught


def raised_in(filename, error):
    """Raise `error` from code that claims to be in `filename`."""
    try:
        exec(compile("raise error", filename, "exec"), {"error": error})
    except type(error) as caught:
        return caught


def validation_error():
    pydantic = pytest.importorskip("pydantic")

    class Model(pydantic.BaseModel):
        length: int

        @pydantic.field_validator("length")
        @classmethod
        def limit(cls, value):
            if value > 8:
                raise ValueError("longer than the model's 8")
            return value

    with pytest.raises(pydantic.ValidationError) as caught:
        Model(length=9)
    return caught.value


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (raised(StartError("lower --x")), "lower --x"),
        (raised(RuntimeError("worker failed"), StartError("lower --x")), "lower --x"),
        (raised_in("/site-packages/vllm/v1/core/kv_cache_utils.py", ValueError("no room")), "no room"),
        (raised_in("/site-packages/vllm/config/model.py", ValueError("no such thing")), "no such thing"),
    ],
)
def test_refusals_need_no_traceback(error, message):
    assert refusal_message(error) == message


@pytest.mark.parametrize(
    "error",
    [
        raised(ValueError("a bug")),
        raised(RuntimeError("a bug")),
        raised_in("/site-packages/vllm/config/model.py", KeyError("a bug")),
        raised_in("/site-packages/vllm/v1/engine/core.py", ValueError("a bug")),
    ],
)
def test_bugs_keep_their_traceback(error):
    assert refusal_message(error) is None


@pytest.mark.parametrize(
    "text",
    [
        "Engine core initialization failed. See root cause above.",
        "WorkerProc initialization failed due to an exception",
        "Worker failed with error 'x', please check the stack trace above",
        "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    ],
)
def test_echo_of_a_childs_failure_is_told_from_other_errors(text):
    assert is_echo(raised(RuntimeError(text)))
    assert not is_echo(raised(RuntimeError("a bug")))


def test_echo_is_logged_without_its_traceback():
    record = record_of(raised(RuntimeError("WorkerProc initialization failed due to an exception")))
    assert ShortStartErrors().filter(record)
    assert logging.Formatter().format(record) == (
        "It failed. A process of the server ended; if it failed, it logged why before this line."
    )


def test_validation_error_is_cut_to_what_was_wrong():
    error = validation_error()
    assert readable(error) == "length: longer than the model's 8"
    assert refusal_message(error) == readable(error)


@pytest.fixture
def error_file(tmp_path, monkeypatch):
    monkeypatch.setenv(start_error.ERROR_FILE, str(tmp_path / "error"))
    return tmp_path / "error"


def record_of(error):
    return logging.LogRecord(
        "vllm.x", logging.ERROR, "x.py", 1, "It %s.", ("failed",), (type(error), error, error.__traceback__)
    )


def test_filter_replaces_the_traceback_by_the_message_and_keeps_the_first(error_file):
    for message in ("100 GiB were asked for", "and then that"):
        record = record_of(raised(StartError(message)))
        assert ShortStartErrors().filter(record)
        assert logging.Formatter().format(record) == f"It failed. {message}"
    assert error_file.read_text() == "100 GiB were asked for"


def test_filter_leaves_other_errors_alone():
    record = record_of(raised(KeyError("bug")))
    assert ShortStartErrors().filter(record)
    assert "Traceback (most recent call last)" in logging.Formatter().format(record)


@pytest.mark.parametrize(("file", "level", "expected"), [("/x", "INFO", 1), ("", "INFO", 0), ("/x", "debug", 0)])
def test_filter_is_installed_once_and_only_where_asked_for(monkeypatch, file, level, expected):
    handler = logging.NullHandler()
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [handler])
    monkeypatch.setenv(start_error.ERROR_FILE, file)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", level)
    for _ in range(3):
        start_error.shorten_start_errors()
    assert len(handler.filters) == expected


CHILD = """
import logging, multiprocessing, sys
from vllm_kunlun.platforms.start_error import StartError, shorten_start_errors

def work(error):
    logging.getLogger("vllm").addHandler(logging.StreamHandler(sys.stdout))
    shorten_start_errors()
    try:
        raise error
    except Exception:
        logging.getLogger("vllm.engine").exception("It failed.")
        raise

if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=work, args=(ERROR,))
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize(("error", "has_traceback"), [("StartError('lower --x')", False), ("KeyError('bug')", True)])
def test_child_process_ends_without_a_traceback_of_a_refusal(error, has_traceback, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CHILD.replace("ERROR", error)],
        env={start_error.ERROR_FILE: str(tmp_path / "error")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert ("Traceback" in done.stdout + done.stderr) is has_traceback
    assert done.stdout.startswith("It failed.")
    assert has_traceback or done.stdout == "It failed. lower --x\n"
