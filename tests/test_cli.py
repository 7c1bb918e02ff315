"""The command as a user runs it, in process and in a process of its own."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from servecast.costmodels.errors import InputError
from servecast.scenarios import cli

LIBRARY = Path(__file__).parents[1] / "scenarios" / "library"
GOLDEN = Path(__file__).parent / "golden"

SMALL = """
name: small
model: meta-llama/Llama-3.1-8B
hardware: h100-sxm
engine: {max_model_len: 4096}
workload:
  arrivals: {kind: poisson, rate_per_s: 4, requests: 30}
  lengths: {kind: fixed, input_tokens: 300, output_tokens: 20}
sla: {ttft_p95_s: 1, itl_p99_s: 0.0001}
"""

LATENCY_KEYS = {"n", "mean", "p50", "p90", "p95", "p99", "max"}
SUMMARY_KEYS = {
    "ttft_s",
    "itl_s",
    "tpot_s",
    "e2e_s",
    "queue_s",
    "requests",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "requests_per_s",
    "duration_s",
    "preemptions",
    "prefix_hit_tokens",
    "kv",
    "memory",
    "utilisation",
    "step_time_share",
    "sla",
    "provenance",
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def invoke(*arguments: object) -> str:
    """Standard output of a command that must succeed."""
    result = typer.testing.CliRunner().invoke(
        cli.app, [str(argument) for argument in arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: object) -> str:
    """The one line with which a command fails."""
    monkeypatch.setattr(sys, "argv", ["servecast", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("servecast: error: ")
    return str(line)


def test_json_alone_on_stdout_with_all_keys(small: Path) -> None:
    summary = json.loads(invoke("run", small, "--json"))
    assert summary.keys() >= SUMMARY_KEYS
    for metric in ("ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s"):
        assert summary[metric].keys() == LATENCY_KEYS
    assert summary["requests"] == {"sent": 30, "completed": 30, "failed": 0, "timed_out": 0}
    assert summary["itl_s"]["n"] == 30 * 19
    assert sum(summary["step_time_share"].values()) == pytest.approx(1)
    assert [clause["met"] for clause in summary["sla"]["clauses"]] == [True, False]
    assert summary["sla"]["met"] is False
    assert "kernels measured on" in summary["provenance"]["calibration"]


def test_out_leaves_four_files_and_the_same_bytes_for_the_same_seed(
    small: Path, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    for out in ("a", "b"):
        invoke("run", small, "--out", tmp_path / out, "--seed", 3)
    files = ["report.html", "requests.parquet", "steps.parquet", "summary.json"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == files
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    requests = pq.read_table(tmp_path / "a" / "requests.parquet")
    assert requests.num_rows == 30
    assert requests.column("first_token_s").null_count == 0


def test_a_seed_changes_the_load_and_replications_give_intervals(small: Path) -> None:
    one = json.loads(invoke("run", small, "--json", "--seed", 1))
    two = json.loads(invoke("run", small, "--json", "--seed", 2))
    assert one["ttft_s"] != two["ttft_s"]
    several = json.loads(invoke("run", small, "--json", "--replications", 3))
    assert several["replications"]["n"] == 3


def test_set_overrides_a_key(small: Path) -> None:
    summary = json.loads(invoke("run", small, "--json", "--set", "engine.block_size=32"))
    assert summary["kv"]["block_size"] == 32


def test_the_summary_reads_at_a_glance(small: Path) -> None:
    text = invoke("run", small)
    for word in ("small", "TTFT", "p99", "KV", "measured on"):
        assert word.lower() in text.lower(), word


@pytest.mark.parametrize("path", sorted(LIBRARY.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_bundled_scenario_runs(path: Path) -> None:
    summary = json.loads(invoke("run", path, "--json"))
    assert summary["requests"]["completed"] == summary["requests"]["sent"] > 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.max_num_sqs=3", "engine.max_num_sqs: unknown key (did you mean max_num_seqs?)"),
        ("engine.max_num_seqs=many", "engine.max_num_seqs"),
        ("engine.gpu_memory_utilization=.nan", "engine.gpu_memory_utilization"),
        ("workload.arrivals.rate_per_s=0", "workload.arrivals.rate_per_s"),
        ("workload.arrivals.rate_per_s=-1", "workload.arrivals.rate_per_s"),
        ("workload.arrivals.rate_per_s=.inf", "workload.arrivals.rate_per_s"),
        ("hardware=rtx-4091", "did you mean rtx-4090"),
        ("model=meta-llama/Llama-3.1-9B", "Llama-3.1-8B"),
        ("model=missing/config.json", "missing/config.json"),
        ("model=meta-llama/Llama-3.1-70B", "does not start: weights"),
        ("engine.max_model_len=100000000", "engine.max_model_len"),
        ("engine.num_gpu_blocks_override=10", "max_model_len 4,096 needs more"),
        ("engine={max_num_seqs: 32, max_num_batched_tokens: 16}", "max_num_batched_tokens"),
        ("engine={enable_chunked_prefill: false, max_num_batched_tokens: 512}", "max_model_len"),
        ("engine={batching: static, async_scheduling: true}", "engine.async_scheduling"),
        ("engine.block_size=17", "block_size: 17 is not supported on h100-sxm"),
        ("engine.tensor_parallel_size=3", "tensor_parallel_size"),
        ("sla.ttft_p96_s=1", "sla.ttft_p96_s"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, override: str, words: str
) -> None:
    assert words in fails(monkeypatch, capsys, "run", small, "--set", override)


def test_nothing_is_half_written(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "--out" in fails(monkeypatch, capsys, "run", small, "--out", blocked / "out")
    fails(monkeypatch, capsys, "run", small, "--out", tmp_path / "o", "--set", "hardware=none")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "Missing argument"),
        (["run", "SMALL", "--seed", "x"], "--seed"),
        (["run", "SMALL", "--replications", "0"], "--replications"),
        (["run", "SMALL", "--nonsense"], "--nonsense"),
        (["size", "SMALL", "--resume"], "--resume: no points"),
        (["size", "SMALL", "--set", "sla.ttft_p96_s=1"], "unknown clause"),
        (["whatif", "SMALL", "--vary", "block_size"], "--vary block_size: expected KEY=A,B,C"),
        (["whatif", "SMALL", "--vary", "engine.blok=3"], "engine.blok: unknown key"),
        (["compare", "SMALL", "missing.yaml"], "missing.yaml: cannot be read"),
        (["init", "--hardware", "l40s", "--", "vllm", "serve"], "no model in the line"),
        (["parity", "--recorded", "nowhere"], "nowhere: cannot be read"),
        (["schedule", "nowhere.json"], "nowhere.json: cannot be read"),
    ],
)
def test_a_bad_command_line_is_one_line_and_exit_2(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: list[str], words: str
) -> None:
    given = [str(small) if word == "SMALL" else word for word in arguments]
    assert words in fails(monkeypatch, capsys, *given)


def test_size_whatif_and_compare_leave_a_result_and_a_report(small: Path, tmp_path: Path) -> None:
    small.write_text(SMALL.replace("0.0001", "1"))
    answers = {
        "sizing.json": ["size", small, "--knobs", "max_num_seqs=1,16"],
        "whatif.json": ["whatif", small, "--vary", "load=1,2", "--replications", 2],
        "compare.json": ["compare", small, small, "--replications", 2],
    }
    for name, command in answers.items():
        out = tmp_path / name
        shown = invoke(*command, "--out", out)
        assert "kernels measured on" in " ".join(shown.split())
        assert json.loads((out / name).read_text())
        assert (out / "report.html").read_text().lower().startswith("<!doctype html>")
        assert list((out / "points").glob("*.json"))


def test_schedule_writes_the_recorded_fields(tmp_path: Path) -> None:
    workload = {
        "config": {"enable_prefix_caching": False},
        "requests": [{"id": "a", "arrival": 2, "prompt_len": 20, "output_len": 2}],
    }
    path = tmp_path / "w.json"
    path.write_text(json.dumps(workload, indent=1))
    steps = [json.loads(line) for line in invoke("schedule", path).splitlines()]
    assert [step["scheduled"] for step in steps] == [{"a": 20}, {"a": 1}, {}]
    assert steps[1]["finished"] == ["a"]


def test_schedule_takes_many_workloads(tmp_path: Path) -> None:
    output = tmp_path / "traces.jsonl"
    invoke("schedule", GOLDEN / "small.jsonl.gz", "-o", output)
    lines = output.read_text().splitlines()
    assert len(lines) == 180
    assert json.loads(lines[7]).keys() == {"seed", "trace"}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("w.json", "{", "w.json: not JSON"),
        ("w.json", "[]", "expected an object"),
        ("w.json", '{"requests": [{"id": 1}]}', "w.json: requests"),
        ("w.jsonl", '{"seed": 1}\n', "w.jsonl:1: workload: missing"),
        ("w.jsonl.gz", "not gzip", "cannot be read"),
    ],
)
def test_a_bad_workload_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    name: str,
    content: str,
    words: str,
) -> None:
    path = tmp_path / name
    path.write_text(content)
    output = tmp_path / "out.jsonl"
    assert words in fails(monkeypatch, capsys, "schedule", path, "-o", output)
    assert not output.exists()


def test_the_reference_in_docs_is_current() -> None:
    committed = Path(__file__).parents[1] / "docs" / "scenario.md"
    assert invoke("schema", "--markdown") == committed.read_text()


def test_the_catalogue_is_listed() -> None:
    listed = invoke("models")
    assert "meta-llama/Llama-3.1-8B" in listed and "mi300x" in listed


def test_start_up_imports_nothing_heavy() -> None:
    """Figures, tables and statistics are imported by the commands that need them."""
    code = "import sys, servecast.scenarios.cli, servecast.scenarios.run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"matplotlib", "pandas", "pyarrow", "scipy", "torch"}


def test_an_input_error_is_one_line() -> None:
    assert not re.search(r"\n", str(InputError("one line")))
