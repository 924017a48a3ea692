"""The table of environment variables."""

from pathlib import Path

import pytest

from vllm_kunlun.platforms import envs
from vllm_kunlun.platforms.envs import EnvironmentVariableError


def test_every_row_is_complete_and_named_once():
    names = [variable.name for variable in envs.VARIABLES]
    assert len(set(names)) == len(names)
    assert all(name.startswith(envs.PREFIX) for name in names)
    assert all(variable.doc and variable.accepted and variable.type for variable in envs.VARIABLES)


def test_every_variable_attribute_of_the_module_is_in_the_table():
    rows = [value for value in vars(envs).values() if isinstance(value, envs.Variable)]
    assert sorted(row.name for row in rows) == sorted(row.name for row in envs.VARIABLES)


@pytest.mark.parametrize("variable", envs.VARIABLES, ids=lambda variable: variable.name)
def test_unset_and_blank_give_the_default(variable):
    home = {"HOME": "/home/someone"}
    assert variable.get(home) == variable.default_value(home)
    assert variable.get({**home, variable.name: "  "}) == variable.default_value(home)
    assert not variable.is_set({variable.name: " "})


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (envs.TARGET, "HOST", "host"),
        (envs.OPS_PROVIDER, "torch", "torch"),
        (envs.ISA, "avx2", "avx2"),
        (envs.NUM_THREADS, "auto", None),
        (envs.NUM_THREADS, " 8 ", 8),
        (envs.CPU_BIND, "none", "none"),
        (envs.CPU_BIND, "0-3,6", (0, 1, 2, 3, 6)),
        (envs.CPU_BIND, "5", (5,)),
        (envs.SPIN_US, "0", 0),
        (envs.CACHE_DIR, "/data/cache", Path("/data/cache")),
    ],
)
def test_values_are_parsed(variable, text, value):
    assert variable.get({variable.name: text}) == value


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (envs.TARGET, "gpu"),
        (envs.ISA, "avx1024"),
        (envs.NUM_THREADS, "0"),
        (envs.NUM_THREADS, "2.5"),
        (envs.NUM_THREADS, "many"),
        (envs.CPU_BIND, "3-1"),
        (envs.CPU_BIND, "0-3,2"),
        (envs.CPU_BIND, "0,,1"),
        (envs.CPU_BIND, "-1"),
        (envs.CPU_BIND, "0-999999999"),
        (envs.SPIN_US, "-5"),
        (envs.CACHE_DIR, "relative/folder"),
    ],
)
def test_wrong_value_is_an_error_that_names_variable_value_and_what_is_accepted(variable, text):
    with pytest.raises(EnvironmentVariableError) as caught:
        variable.get({variable.name: text})
    assert f"{variable.name}={text}" in str(caught.value)
    assert variable.accepted in str(caught.value)


def test_misspelt_choice_gets_a_suggestion():
    with pytest.raises(EnvironmentVariableError, match="did you mean 'p800'"):
        envs.TARGET.get({"VLLM_KUNLUN_TARGET": "p80"})


def test_variables_are_read_when_asked_for(monkeypatch):
    monkeypatch.setenv("VLLM_KUNLUN_SPIN_US", "7")
    assert envs.SPIN_US.get() == 7
    monkeypatch.setenv("VLLM_KUNLUN_SPIN_US", "8")
    assert envs.SPIN_US.get() == 8


def test_cache_directory_follows_xdg():
    assert envs.CACHE_DIR.get({"HOME": "/home/a"}) == Path("/home/a/.cache/vllm-kunlun")
    assert envs.CACHE_DIR.get({"HOME": "/home/a", "XDG_CACHE_HOME": "/fast"}) == Path("/fast/vllm-kunlun")
    # the XDG specification tells programs to ignore relative paths
    assert envs.CACHE_DIR.get({"HOME": "/home/a", "XDG_CACHE_HOME": "fast"}) == Path("/home/a/.cache/vllm-kunlun")


def test_unknown_variable_is_listed_with_the_nearest_name():
    environ = {"VLLM_KUNLUN_THREADS": "4", "VLLM_KUNLUN_ZZZZ": "1", "VLLM_KUNLUN_ISA": "avx2", "VLLM_PLUGINS": "x"}
    unknown = envs.unknown_variables(environ)
    assert [(entry.name, entry.nearest) for entry in unknown] == [
        ("VLLM_KUNLUN_THREADS", "VLLM_KUNLUN_NUM_THREADS"),
        ("VLLM_KUNLUN_ZZZZ", None),
    ]
    assert "Did you mean VLLM_KUNLUN_NUM_THREADS?" in str(unknown[0])


def test_unknown_variable_warns_once(monkeypatch):
    messages = []
    monkeypatch.setenv("VLLM_KUNLUN_TARGETT", "host")
    monkeypatch.setattr(envs, "_warned", set())
    monkeypatch.setattr(envs.logger, "warning", lambda text, *arguments: messages.append(text % arguments))
    envs.warn_unknown()
    envs.warn_unknown()
    assert messages == ["Unknown environment variable VLLM_KUNLUN_TARGETT is ignored. Did you mean VLLM_KUNLUN_TARGET?"]


def test_validate_reads_the_whole_table():
    envs.validate({"HOME": "/home/a"})
    with pytest.raises(EnvironmentVariableError, match="VLLM_KUNLUN_SPIN_US"):
        envs.validate({"HOME": "/home/a", "VLLM_KUNLUN_SPIN_US": "soon"})


def test_the_vendors_variables_show_where_they_come_from():
    from vllm_kunlun.cli.environment import vendor_text

    lines = vendor_text({"XMLIR_CUDNN_ENABLED": "0"}).splitlines()
    assert any(line.startswith("XMLIR_CUDNN_ENABLED = 0  (environment)") for line in lines)
    assert any(line.startswith("XMLIR_FORCE_USE_XPU_GRAPH = 1  (set at start)") for line in lines)
