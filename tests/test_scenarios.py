"""A scenario is read strictly: what is wrong is said in one line with place, key and value."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import servecast.scenarios
from servecast.costmodels.catalogue import load_hardware
from servecast.costmodels.errors import InputError
from servecast.scenarios import slas, traces
from servecast.scenarios.idle_keys import idle_keys
from servecast.scenarios.load import LoadedScenario, load_scenario, to_json_schema
from servecast.scenarios.schema import Scenario, TraceFormat
from servecast.scenarios.yamlfile import parse

FOLDER = Path(servecast.scenarios.__file__).parent
LUCKLESS = "{kind: mean, acceptance_length: 2}"
LIBRARY = sorted((FOLDER / "library").glob("*.yaml"))

GOOD = """\
name: test
model: meta-llama/Llama-3.1-8B
hardware: h100-sxm
engine:
  max_num_seqs: 256
  max_num_batched_tokens: 8192
workload:
  arrivals: {kind: poisson, rate_per_s: 4, duration_s: 600}
  lengths:
    kind: fixed
    input_tokens: 512
    output_tokens: 128
sla: {ttft_p95_s: 0.5, itl_p99_s: 0.08, timeout_rate: 0.001}
"""


def load(folder: Path, text: str, overrides: Sequence[str] = ()) -> LoadedScenario:
    path = folder / "a.yaml"
    path.write_text(text, encoding="utf-8")
    return load_scenario(path, overrides)


def complaint(folder: Path, text: str, overrides: Sequence[str] = ()) -> str:
    """The one line a bad scenario gets, without the folder's name."""
    with pytest.raises(InputError) as caught:
        load(folder, text, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{folder}/", "")


def test_a_good_scenario_is_read(tmp_path: Path) -> None:
    loaded = load(tmp_path, GOOD)
    scenario = loaded.scenario
    assert scenario.engine.max_num_seqs == 256
    assert scenario.engine.block_size is None
    assert scenario.workload.arrivals.kind == "poisson"
    assert scenario.sla == {"ttft_p95_s": 0.5, "itl_p99_s": 0.08, "timeout_rate": 0.001}
    assert scenario.seed == 0
    assert loaded.sha256 == hashlib.sha256(GOOD.encode()).hexdigest()


def test_a_scenario_cannot_be_changed(tmp_path: Path) -> None:
    scenario = load(tmp_path, GOOD).scenario
    with pytest.raises(ValueError, match="frozen"):
        scenario.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        # unknown keys
        (
            "max_num_seqs: 256",
            "max_num_sqs: 256",
            "a.yaml:5: engine.max_num_sqs: unknown key (did you mean max_num_seqs?)",
        ),
        (
            "rate_per_s: 4",
            "rate: 4",
            "a.yaml:8: workload.arrivals.rate: unknown key (did you mean rate_per_s?)",
        ),
        (
            "kind: poisson",
            "kind: poison",
            "a.yaml:8: workload.arrivals.kind: unknown kind 'poison' (did you mean poisson?)",
        ),
        ("ttft_p95_s", "ttft_p96_s", "a.yaml:13: sla.ttft_p96_s: unknown clause"),
        # wrong types
        (
            "rate_per_s: 4",
            "rate_per_s: 20/s",
            "a.yaml:8: workload.arrivals.rate_per_s: expected a number, got '20/s' "
            "(the unit is in the key's name)",
        ),
        ("256", "'256'", "a.yaml:5: engine.max_num_seqs: expected a whole number, got '256'"),
        ("256", "16.5", "a.yaml:5: engine.max_num_seqs: expected a whole number, got 16.5"),
        ("256", "true", "a.yaml:5: engine.max_num_seqs: expected a whole number, got true"),
        ("name: test", "name:", "a.yaml:1: name: expected text, got nothing"),
        ("sla: {", "sla: [a] #", "a.yaml:13: sla: expected a block of keys, got a list of 1"),
        # numbers out of range
        (
            "rate_per_s: 4",
            "rate_per_s: .nan",
            "a.yaml:8: workload.arrivals.rate_per_s: must be finite, got nan",
        ),
        (
            "duration_s: 600",
            "duration_s: .inf",
            "a.yaml:8: workload.arrivals.duration_s: must be finite, got inf",
        ),
        (
            "rate_per_s: 4",
            "rate_per_s: 0",
            "a.yaml:8: workload.arrivals.rate_per_s: must be at least 1e-06, got 0",
        ),
        (
            "duration_s: 600",
            "duration_s: -1",
            "a.yaml:8: workload.arrivals.duration_s: must be greater than 0, got -1",
        ),
        (
            "output_tokens: 128",
            "output_tokens: 0",
            "a.yaml:12: workload.lengths.output_tokens: must be at least 1, got 0",
        ),
        ("0.08", "-1", "a.yaml:13: sla.itl_p99_s: must be seconds greater than 0, got -1.0"),
        ("0.001", "2", "a.yaml:13: sla.timeout_rate: must be a share from 0 to 1, got 2.0"),
        # keys that do not go together
        (
            "8192",
            "100",
            "a.yaml:6: engine.max_num_batched_tokens: must be at least max_num_seqs (256), got 100",
        ),
        (
            "duration_s: 600",
            "duration_s: 600, requests: 3",
            "a.yaml:8: workload.arrivals.requests: give exactly one of requests and duration_s",
        ),
        (
            "duration_s: 600",
            "stages: [{rate_per_s: 1, duration_s: 3}]",
            "a.yaml:8: workload.arrivals.rate_per_s: not together with stages",
        ),
        # missing keys
        ("hardware: h100-sxm\n", "", "a.yaml:1: hardware: required key is missing"),
        ("kind: poisson, ", "", "a.yaml:8: workload.arrivals.kind: required key is missing"),
        ("    input_tokens: 512\n", "", "a.yaml:9: workload.lengths.input_tokens: required key"),
        # not the YAML that is read here
        ("engine:", "name: b\nengine:", "a.yaml:4: name: key given twice, first at a.yaml:1"),
        ("name: test", "name: !!python/object:os.system x", "a.yaml:1: name: tags are not acc"),
        ("name: test", "name: [", "not valid YAML"),
        ("name: test", "? [a]\n: b", "a.yaml:1: a key must be one word"),
        ("sla:", "---\nsla:", "a.yaml:13: a second document; give one only"),
        ("name: test", "name: *no", "a.yaml:1: name: alias *no has no anchor before it"),
        ("name: test", "name: \x07", "not valid YAML"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in GOOD
    assert expected in complaint(tmp_path, GOOD.replace(old, new, 1))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ("{kind: uniform, input_tokens: {min: 5, max: 4}, output_tokens: {min: 1, max: 2}}", "max"),
        ("{kind: lognormal, input_tokens: {median: 5}, output_tokens: {mean: 5, sigma: 1}}", "sig"),
        ("{kind: lognormal, input_tokens: {mean: 5, p95: 50}, output_tokens: {}}", "p95"),
        ("{kind: lognormal, input_tokens: {mean: 5, p95: 4}, output_tokens: {}}", "p95"),
        ("{kind: empirical, input_tokens: {p0: 1, p50: 2}, output_tokens: {p0: 1, p100: 2}}", ""),
        ("{kind: empirical, input_tokens: {p0: 3, p100: 2}, output_tokens: {p0: 1, p100: 2}}", ""),
        ("{kind: empirical, input_tokens: {p0: 3, q: 2}, output_tokens: {p0: 1, p100: 2}}", "q"),
    ],
)
def test_impossible_lengths_are_refused(tmp_path: Path, lengths: str, expected: str) -> None:
    message = complaint(tmp_path, GOOD, [f"workload.lengths={lengths}"])
    assert f"workload.lengths.input_tokens{'.' if expected else ''}{expected}" in message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["workload.lengths=null"], "workload.lengths: required key is missing"),
        (["workload.classes=[{name: a, weight: 1}, {name: a, weight: 2}]"], "two classes are"),
        (["workload.classes=[]"], "workload.classes: expected a list of at least one"),
        (
            ["workload.arrivals={kind: trace, path: t.csv}", "workload.sessions={turns: 2}"],
            "workload.sessions: not together with a trace",
        ),
        (["workload.arrivals={kind: burst, requests: 4, size: 2}"], "arrivals.interval_s: give"),
        (["workload.arrivals={kind: constant, requests: 4}"], "rate_per_s: required key is miss"),
    ],
)
def test_blocks_that_do_not_go_together(
    tmp_path: Path, overrides: list[str], expected: str
) -> None:
    assert expected in complaint(tmp_path, GOOD, overrides)


def test_a_large_file_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(10_000_000)
    with pytest.raises(
        InputError, match=r"large\.yaml: 10000000 bytes is too large, at most 1000000"
    ):
        load_scenario(path)


def test_exploding_aliases_are_refused(tmp_path: Path) -> None:
    levels = "\n".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 9))
    assert "values" in complaint(tmp_path, f"x0: &x0 lol\n{levels}\n")
    many = "a: &a 1\nb: [" + ", ".join(["*a"] * 200) + "]\n"
    assert "a.yaml:2: b.100: more than 100 aliases" in complaint(tmp_path, many)


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    assert "nested deeper than 32 levels" in complaint(tmp_path, "a: " + "[" * 50 + "]" * 50)
    assert "not valid YAML" in complaint(tmp_path, "a: " + "[" * 100_000)


def test_a_file_that_is_no_scenario(tmp_path: Path) -> None:
    assert "a.yaml:1: expected a block of keys, got nothing" in complaint(tmp_path, "")
    assert "a.yaml:1: expected a block of keys, got 'text'" in complaint(tmp_path, "text")
    with pytest.raises(InputError, match=r"none\.yaml: cannot be read: No such file"):
        load_scenario(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        load_scenario(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"name: a\nmodel: \xff\n")
    with pytest.raises(InputError, match=r"b\.yaml:2: not UTF-8 text"):
        load_scenario(tmp_path / "b.yaml")


def test_an_override_replaces_a_value(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        GOOD,
        [
            "engine.max_num_seqs=64",
            "engine.enforce_eager=true",
            "workload.arrivals={kind: constant, stages: [{rate_per_s: 8, duration_s: 60}]}",
            "workload.arrivals.stages.0.rate_per_s=1e1",
            "price_per_hour=2.5",
        ],
    )
    assert loaded.scenario.engine.max_num_seqs == 64
    assert loaded.scenario.engine.enforce_eager is True
    assert loaded.scenario.price_per_hour == 2.5
    arrivals = loaded.scenario.workload.arrivals
    assert arrivals.kind == "constant"
    assert arrivals.stages is not None
    assert arrivals.stages[0].rate_per_s == 10.0
    assert loaded.sha256 != load(tmp_path, GOOD).sha256


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("engine.max_num_sqs=3", "--set engine.max_num_sqs=3: engine.max_num_sqs: unknown key"),
        ("seed=-1", "--set seed=-1: seed: must be at least 0, got -1"),
        ("seed", "--set seed: expected key=value with a dotted key"),
        ("=3", "--set =3: expected key=value with a dotted key"),
        ("a." * 5000 + "a=1", "expected key=value with a dotted key"),
        ("seed=[", "--set seed=[: not valid YAML"),
        ("seed.x=1", None),
        ("name.x=1", "--set name.x=1: name.x: the key above holds 'test', not a block"),
        # A clash with the file is placed where the clashing key stands.
        ("engine.max_num_seqs=9000", "a.yaml:6: engine.max_num_batched_tokens: must be at least"),
    ],
)
def test_a_bad_override_is_named(tmp_path: Path, override: str, expected: str | None) -> None:
    assert (expected or f"--set {override}") in complaint(tmp_path, GOOD, [override])


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=150)
def test_no_bytes_bring_a_traceback(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_scenario(path)
    assert "\n" not in str(caught.value)


@given(st.lists(st.sampled_from([*"[]{}:,-&*!|>'\"%@`#?\n \t", "a", "1", "- ", "a: ", "&x", "*x"])))
@settings(deadline=None, max_examples=300)
def test_no_yaml_brings_a_traceback(tokens: list[str]) -> None:
    try:
        parse("".join(tokens), lambda line: f"line {line}")
    except InputError as error:
        assert "\n" not in str(error)


_KEYS = st.sampled_from(["engine", "engine.max_num_seqs", "workload", "workload.arrivals", "sla"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(st.sampled_from(["kind", "rate_per_s", "a"]), below)
    ),
    max_leaves=5,
)


@given(_KEYS, _VALUES)
@settings(deadline=None, max_examples=200)
def test_no_value_brings_a_traceback(tmp_path_factory: Any, key: str, value: object) -> None:
    path = tmp_path_factory.getbasetemp() / "good.yaml"
    path.write_text(GOOD)
    try:
        load_scenario(path, [f"{key}={json.dumps(value)}"])
    except InputError as error:
        assert "\n" not in str(error)


def test_words_and_numbers_are_those_of_yaml_1_2() -> None:
    text = "[1e3, 1_000_000, on, yes, 1:30, 010, 0x10, 2020-01-01, ~, true, -.5, '7', 1__0]"
    expected = [1000.0, 1_000_000, "on", "yes", "1:30", 10, "0x10", "2020-01-01", None, True, -0.5]
    assert parse(text, str).value == [*expected, "7", "1__0"]


@pytest.mark.parametrize("name", slas.CLAUSE_NAMES)
def test_clauses_are_taken_apart(name: str) -> None:
    clause = slas.parse_clause(name, 0.5)
    written = f"{clause.metric}_{clause.stat}" + ("" if clause.stat == "rate" else "_s")
    assert (written, clause.name, clause.limit) == (name, name, 0.5)


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.stem)
def test_bundled_scenarios_are_good(path: Path) -> None:
    scenario = load_scenario(path).scenario
    text = path.read_text()
    assert text.startswith("# yaml-language-server: $schema=../scenario.schema.json\n")
    assert scenario.name == path.stem
    assert scenario.description
    # What serves a claim about speculation asks for no limits.
    assert scenario.sla or path.stem.startswith("speculation-")


def test_bundled_scenarios_cover_five_loads_on_three_devices() -> None:
    loads: dict[str, set[str]] = {}
    for path in LIBRARY:
        if path.stem.startswith(("cpu-replay", "speculation-")):
            continue
        scenario = load_scenario(path).scenario
        kind = next(k for k in ("chat", "code", "rag", "reasoning", "batch") if k in path.stem)
        loads.setdefault(kind, set()).add(scenario.hardware)
    assert all(len(devices) >= 3 for devices in loads.values())
    assert len(loads) == 5


def test_the_committed_json_schema_is_up_to_date() -> None:
    committed = json.loads((FOLDER / "scenario.schema.json").read_text())
    assert committed == json.loads(json.dumps(to_json_schema()))


def test_every_field_is_described() -> None:
    schema = to_json_schema()
    blocks = [schema, *schema["$defs"].values()]
    for block in blocks:
        for name, field in block.get("properties", {}).items():
            assert field.get("description"), (block["title"], name)


def test_trace_formats_are_those_that_are_read() -> None:
    assert set(get_args(TraceFormat)) == {"auto", *traces.LAYOUTS}


def test_defaults_leave_the_engine_to_vllm() -> None:
    engine = Scenario.model_fields["engine"].get_default(call_default_factory=True)
    assert set(engine.model_dump().values()) == {None}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["engine.batch_wait_s=0.2"], "engine.batch_wait_s: has no effect without batching"),
        (["engine.batch_wait_s=0.2", "engine.batching=static"], None),
        (["engine.swap_space=8"], "engine.swap_space: has no effect without preemption_mode"),
        (["engine.swap_space=8", "engine.preemption_mode=swap"], None),
        (["engine.gpu_memory_utilization=0.8"], None),
        (
            ["engine.gpu_memory_utilization=0.8", "hardware=cerebras-wse3"],
            "engine.gpu_memory_utilization: has no effect on cerebras-wse3",
        ),
        (
            [f"workload.classes=[{{name: a, weight: 1, acceptance: {LUCKLESS}}}]"],
            "workload.classes.a.acceptance: has no effect without engine.speculative_config",
        ),
    ],
)
def test_keys_that_do_nothing_are_told(changes: list[str], told: str | None) -> None:
    loaded = load_scenario(FOLDER / "library/chat-h100.yaml", changes)
    found = idle_keys(loaded.scenario, load_hardware(loaded.scenario.hardware))
    assert len(found) == (told is not None)
    assert told is None or found[0].startswith(told)


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.stem)
def test_bundled_scenarios_have_no_idle_keys(path: Path) -> None:
    scenario = load_scenario(path).scenario
    assert idle_keys(scenario, load_hardware(scenario.hardware)) == []
