"""Sweeps: the same bytes whoever computes them, nothing lost by a kill, nothing done twice."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servecast.costmodels.errors import InputError
from servecast.scenarios.factors import LOAD_FACTORS, change
from servecast.scenarios.knobs import full_key, parse_vary
from servecast.scenarios.load import LoadedScenario, load_scenario
from servecast.scenarios.points import Point, evaluate
from servecast.scenarios.store import Store, to_line
from servecast.scenarios.sweep import Sweep

SMALL = """
name: small
model: meta-llama/Llama-3.1-8B
hardware: h100-sxm
engine: {max_model_len: 4096}
workload:
  arrivals: {kind: poisson, rate_per_s: 20, requests: 60}
  lengths: {kind: fixed, input_tokens: 300, output_tokens: 20}
sla: {ttft_p95_s: 1}
"""


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedScenario:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return load_scenario(path)


def points(loaded: LoadedScenario, n: int = 6) -> list[Point]:
    return [
        Point(change(loaded.scenario, {"engine.max_num_seqs": 2 + i}), loaded.path, 0)
        for i in range(n)
    ]


def lines(sweep: Sweep, wanted: list[Point]) -> list[str]:
    return [to_line(result) for result in sweep.run(wanted)]


def test_a_point_is_named_by_all_that_decides_it(loaded: LoadedScenario, tmp_path: Path) -> None:
    point = Point(loaded.scenario, loaded.path, 0)
    renamed = Point(loaded.scenario.model_copy(update={"name": "other"}), loaded.path, 0)
    assert renamed.key == point.key
    others = [
        replace(point, seed=1),
        replace(point, requests=10),
        replace(point, version="other"),
        replace(point, profile=replace(point.profile, host_step_s=1.0)),
        Point(change(loaded.scenario, {"load": 2}), loaded.path, 0),
    ]
    assert len({point.key, *(other.key for other in others)}) == len(others) + 1


def test_the_content_of_a_trace_is_part_of_the_name(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    keys = []
    for tokens in (10, 11):
        folder = tmp_path / str(tokens)
        folder.mkdir()
        (folder / "t.csv").write_text(
            f"arrival_s,input_tokens,output_tokens\n0,{tokens},5\n1,9,4\n"
        )
        path = folder / "s.yaml"
        path.write_text(
            SMALL.split("workload:")[0] + "workload: {arrivals: {kind: trace, path: t.csv}}\n"
        )
        keys.append(Point(load_scenario(path).scenario, path, 0).key)
    assert keys[0] != keys[1]
    assert not trace.exists()


def test_results_come_in_order_and_are_not_computed_twice(
    loaded: LoadedScenario, tmp_path: Path
) -> None:
    wanted = points(loaded)
    with Sweep(Store(tmp_path / "points")) as sweep:
        first = lines(sweep, wanted)
        assert sweep.evaluated == len(wanted)
        assert lines(sweep, wanted) == first
        assert sweep.evaluated == len(wanted)
    assert [json.loads(line)["key"] for line in first] == [p.key for p in wanted]
    with Sweep(Store(tmp_path / "points")) as again:
        assert lines(again, wanted) == first
        assert again.evaluated == 0
        # What was spent counts alike, so that a search that goes on decides alike.
        assert (again.used_points, again.used_requests) == (sweep.used_points, sweep.used_requests)
        assert again.used_requests == sum(json.loads(line)["requests"] for line in first)


def test_processes_give_the_same_bytes(loaded: LoadedScenario) -> None:
    wanted = points(loaded)
    with Sweep(Store(None)) as here, Sweep(Store(None), "2") as there:
        assert lines(here, wanted) == lines(there, wanted)


def test_a_broken_result_is_computed_again(loaded: LoadedScenario, tmp_path: Path) -> None:
    (point,) = points(loaded, 1)
    with Sweep(Store(tmp_path)) as sweep:
        (good,) = lines(sweep, [point])
    (tmp_path / f"{point.key}.json").write_text(good[:100])
    with Sweep(Store(tmp_path)) as sweep:
        assert lines(sweep, [point]) == [good]
        assert sweep.evaluated == 1


def test_a_living_claim_is_respected_and_a_dead_one_is_not(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.claim("k") as mine, store.claim("k") as other:
        assert mine and not other
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with store.claim("k"):
        claim = (tmp_path / "k.claim").read_text()
    host = claim.split()[0]
    (tmp_path / "k.claim").write_text(f"{host} {dead.pid}")
    with store.claim("k") as mine:
        assert mine
    assert not list(tmp_path.iterdir())


def test_two_sweeps_on_one_folder_share_the_work(loaded: LoadedScenario, tmp_path: Path) -> None:
    wanted = points(loaded, 8)
    sweeps = [Sweep(Store(tmp_path)) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(lambda sweep: lines(sweep, wanted), sweeps))
    assert results[0] == results[1]
    assert sum(sweep.evaluated for sweep in sweeps) == len(wanted)


def test_a_killed_sweep_goes_on_where_it_was(loaded: LoadedScenario, tmp_path: Path) -> None:
    def command(out: str) -> list[str]:
        program = "from servecast.scenarios.cli import main; main()"
        options = ["--knobs", "max_num_seqs=2,4,8,16,32,64", "--out", str(tmp_path / out)]
        return [sys.executable, "-c", program, "size", str(loaded.path), "--json", *options]

    whole = subprocess.run(command("whole"), capture_output=True, text=True, check=True)
    process = subprocess.Popen(
        command("killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    folder = tmp_path / "killed" / "points"
    while process.poll() is None and len(list(folder.glob("*.json"))) < 5:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    resumed = subprocess.run(
        [*command("killed"), "--resume"], capture_output=True, text=True, check=True
    )
    assert resumed.stdout == whole.stdout
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len(list(folder.glob("*.json"))) == json.loads(whole.stdout)["points_simulated"]


def test_ray_gives_the_same_bytes_with_a_worker_killed(
    loaded: LoadedScenario, tmp_path: Path
) -> None:
    """A local cluster of two worker processes, one of which is killed while it works."""
    pytest.importorskip("ray", reason="Ray is not installed")
    script = tmp_path / "on_ray.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, signal, subprocess, threading, time
            from pathlib import Path
            from servecast.scenarios.factors import change
            from servecast.scenarios.load import load_scenario
            from servecast.scenarios.points import Point
            from servecast.scenarios.store import Store, to_line
            from servecast.scenarios.sweep import Sweep

            path = Path({str(loaded.path)!r})
            scenario = change(load_scenario(path).scenario, {{"workload.arrivals.requests": 9000}})
            points = [
                Point(change(scenario, {{"engine.max_num_seqs": 2 + i}}), path, 0) for i in range(8)
            ]
            killed = []

            def kill_one():
                while not killed:
                    found = subprocess.run(
                        ["pgrep", "-f", "ray::evaluate"], capture_output=True, text=True
                    )
                    killed.extend(int(pid) for pid in found.stdout.split()[:1])
                    time.sleep(0.05)
                os.kill(killed[0], signal.SIGKILL)

            with Sweep(Store(None)) as sweep:
                here = [to_line(result) for result in sweep.run(points)]
            with Sweep(Store(None), "ray") as sweep:
                threading.Thread(target=kill_one, daemon=True).start()
                there = [to_line(result) for result in sweep.run(points)]
            print("same" if here == there else "different", len(killed))
            """
        )
    )
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-2:] == ["same", "1"]


@pytest.mark.parametrize("workers", ["0", "many", "-1"])
def test_bad_workers(workers: str) -> None:
    with pytest.raises(InputError, match=f"--workers {workers}"):
        Sweep(Store(None), workers)


def test_a_point_that_does_not_start_has_a_reason(loaded: LoadedScenario) -> None:
    point = Point(change(loaded.scenario, {"hardware": "t4"}), loaded.path, 0)
    result = evaluate(point)
    assert "does not start" in result["error"]
    assert result.keys() == {"key", "seed", "error"}


# ---------------------------------------------------------------- what is varied


@pytest.mark.parametrize(
    ("factor", "value", "read"),
    [
        ("load", 3, lambda s: s.workload.arrivals.rate_per_s == 60),
        ("prompt", 2, lambda s: s.workload.input_scale == 2),
        ("output", 0.5, lambda s: s.workload.output_scale == 0.5),
        ("burstiness", 4, lambda s: s.workload.arrivals.kind == "gamma"),
        ("engine.kv_cache_dtype", "fp8", lambda s: s.engine.kv_cache_dtype == "fp8"),
        ("hardware", "l40s", lambda s: s.hardware == "l40s"),
        ("replicas", 4, lambda s: s.replicas == 4),
        ("engine.max_model_len", None, lambda s: s.engine.max_model_len is None),
    ],
)
def test_factors(loaded: LoadedScenario, factor: str, value: Any, read: Any) -> None:
    assert read(change(loaded.scenario, {factor: value}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine.max_num_sqs": 3}, r"max_num_sqs=3: engine.max_num_sqs: unknown key"),
        ({"load": 0}, "load: expected a number above 0, got 0"),
        ({"load": "fast"}, "load: expected a number above 0"),
        ({"name.first": 1}, "name is not a block of keys"),
        ({"workload.arrivals": {"kind": "burst", "requests": 3}, "burstiness": 2}, "burstiness"),
    ],
)
def test_bad_changes_are_told_in_one_line(
    loaded: LoadedScenario, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words) as told:
        change(loaded.scenario, changes)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_num_seqs=8,16", ("engine.max_num_seqs", [8, 16])),
        ("load=x1..x3", ("load", [1, 2, 3])),
        ("load=1..2:0.5", ("load", [1, 1.5, 2])),
        ("hardware=h100-sxm,l40s", ("hardware", ["h100-sxm", "l40s"])),
        ("failure={at_s: 60, replicas: 1},null", ("failure", [{"at_s": 60, "replicas": 1}, None])),
        ("kv-cache-dtype=auto,fp8,auto", ("engine.kv_cache_dtype", ["auto", "fp8"])),
    ],
)
def test_vary(text: str, expected: tuple[str, list[Any]]) -> None:
    assert parse_vary(text, "--vary") == expected


@given(st.text(max_size=40))
def test_vary_refuses_in_one_line_or_not_at_all(text: str) -> None:
    try:
        key, values = parse_vary(text, "--vary")
    except InputError as error:
        assert str(error).startswith("--vary")
    else:
        assert key == full_key(key) and values


@pytest.mark.parametrize("factor", sorted(LOAD_FACTORS))
def test_a_load_factor_alone_takes_usual_values_around_today(factor: str) -> None:
    key, values = parse_vary(factor, "--vary")
    assert key == factor and values == sorted(set(values)) and 1 in values
    assert values[-1] > 1


@pytest.mark.parametrize(
    "text", ["block_size", "=1", "load=", "load=3..1", "load=a..b", "k=0..9999999"]
)
def test_bad_vary(text: str) -> None:
    with pytest.raises(InputError, match="--vary"):
        parse_vary(text, "--vary")
