"""The contract on the terminal, as JSON and in the documentation."""

import json
import subprocess
import sys

import pytest

from vllm_kunlun.cli import contract as command
from vllm_kunlun.targets.p800.contract_load import load
from vllm_kunlun.tools import contract_table

CONTRACT = load()


def test_page_has_a_section_for_every_callable_and_a_row_for_every_fault():
    page = contract_table.as_markdown()
    assert [name for name in CONTRACT.ops if f"\n### `{name}`\n" not in page] == []
    assert [name for name in CONTRACT.faults if f"| {name}" not in page and f"| `{name}`" not in page] == []
    assert [name for name in CONTRACT.device_rules if f"| `{name}` |" not in page] == []


def test_page_shows_arguments_with_their_rules():
    page = contract_table.as_markdown()
    section = page.partition("### `kunlun_ops.speculative_attention`")[2].partition("\n### ")[0]
    row = next(line for line in section.splitlines() if line.startswith("| `context_lens_cpu`"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "`context_lens_cpu`", "in", "int32", "`[batch_num]`", "contiguous, host", "required",
        "same values as its context lengths pair; below `max_context_len`",
    ]  # fmt: skip
    assert "Known faults: `decode-batch-limit`" in section
    assert "absent from some builds" in section


def test_tables_of_the_page_have_as_many_cells_as_titles():
    columns = 0
    for line in contract_table.as_markdown().splitlines():
        cells = line.replace("\\|", "").count("|")
        if line.startswith("|"):
            columns = columns or cells
            assert cells == columns, line
        else:
            columns = 0


def test_every_callable_and_fault_is_printed(monkeypatch, capsys):
    command.show_contract(as_json=False)
    text = capsys.readouterr().out
    assert [name for name in (*CONTRACT.ops, *CONTRACT.faults) if f"\n{name}  (" not in f"\n{text}"] == []
    assert "rmsnorm(x, weight, output, eps=1e-05)" in text
    assert "add_rmsnorm(x, y, *, weight, eps=1e-05" in text
    assert "ranks_kernel(arguments not known)" in text


@pytest.mark.parametrize("width", [60, 120])
def test_terminal_lines_keep_to_the_width(width):
    names = max(len(f"{name}  (torch25 some wheels, torch29 some wheels; uncertain)") for name in CONTRACT.ops)
    assert max(len(line) for line in command.lines(width)) <= max(width, names)


def test_json_holds_everything_once():
    data = json.loads(json.dumps(contract_table.as_data()))
    assert [op["name"] for op in data["ops"]] == list(CONTRACT.ops)
    assert [fault["name"] for fault in data["faults"]] == list(CONTRACT.faults)
    norm = data["ops"][0]
    assert norm["presence"] == {"torch25": "seen", "torch29": "seen"}
    assert norm["arguments"][3]["default"] == 1e-5 and norm["arguments"][0]["default"] == "required"
    decode = next(op for op in data["ops"] if op["name"] == "kunlun_ops.speculative_attention")
    assert decode["faults"][0] == "decode-batch-limit"
    limit = next(fault for fault in data["faults"] if fault["name"] == "decode-batch-limit")
    assert (limit["region"], limit["parameters"]) == ("batch_num >= batch", {"batch": 1024})


def test_command_prints_the_contract_without_torch():
    code = (
        "import sys; sys.argv = ['vllm-kunlun', 'ops', '--contract']\n"
        "from vllm_kunlun.cli.main import app\n"
        "app(standalone_mode=False); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "kunlun_ops.rmsnorm  (" in done.stdout
    assert done.stdout.endswith("False\n")
