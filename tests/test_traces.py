"""Recorded loads are recognised by content, counted from zero, and refused with their line."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servecast.costmodels.errors import InputError
from servecast.scenarios.traces import TraceRows, read_trace, share_blocks
from servecast.sim.request import block_keys

SHARED = Path(__file__).parents[1].parent / "shared"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="recorded loads are not here")


def read(folder: Path, text: str, layout: str = "auto", limit: int | None = None) -> TraceRows:
    """A trace that needs no mending."""
    return read_trace(written(folder, text), pytest.fail, layout, limit)


def written(folder: Path, text: str) -> Path:
    path = folder / "t.csv"
    path.write_text(text, encoding="utf-8")
    return path


def columns(rows: TraceRows) -> list[tuple[int, int, int]]:
    lists = (rows.arrival_ns.tolist(), rows.prompt_tokens.tolist(), rows.output_tokens.tolist())
    return list(zip(*lists, strict=True))


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:17:03.9799600,10,2\n2023-11-16 18:17:05.4799600,20,3\n",
            "azure",
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2024-05-10 00:00:01+00:00,10,2\n2024-05-10 00:00:02.500000+00:00,20,3\n",
            "azure",
        ),
        (
            '{"timestamp": 500, "input_length": 10, "output_length": 2, "hash_ids": [7]}\n'
            '{"timestamp": 2000, "input_length": 20, "output_length": 3, "hash_ids": [8]}\n',
            "mooncake",
        ),
        (
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,ChatGPT,10,2,12,Conversation log\n6.5,GPT-4,20,3,23,API log\n",
            "burstgpt",
        ),
        (
            "idx,arrival_time_ns,input_toks,output_toks,block16_prefix_ids\n"
            "0,7,10,2,\n1,1500000007,20,3,4\n",
            "sharegpt",
        ),
        (
            '{"request_id": "a", "input_toks": 10, "output_toks": 2, "arrival_time": 1787267980.0}'
            '\n{"request_id": "b", "input_toks": 20, "output_toks": 3, '
            '"arrival_time": 1787267981.5}\n',
            "requests",
        ),
        ("arrival_s,input,output\r\n0.5,10,2\r\n\r\n2,20,3", "plain"),
        ("arrival_ms,prompt_tokens,completion_tokens\n500,10,2\n2000,20.0,3\n", "plain"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,10,2\n2.0,20,3\n", "plain"),
        (
            '{"arrival": 0.5, "input": 10, "output": 2}\n{"arrival": 2, "input": 20, "output": 3}',
            "",
        ),
        ("\ufeffTime,Input-Tokens,Output Tokens\n2023-01-01,10,2\n2023-01-01T00:00:01.5Z,20,3", ""),
    ],
)
def test_layouts_are_known_by_content(tmp_path: Path, text: str, layout: str) -> None:
    rows = read(tmp_path, text)
    assert columns(rows) == [(0, 10, 2), (1_500_000_000, 20, 3)]
    assert f"({layout or 'plain'}, 2 requests)" in rows.source
    assert rows.shared is None


def test_a_named_layout_decides(tmp_path: Path) -> None:
    text = "timestamp,input_length,output_length\n500,10,2\n2000,20,3\n"
    assert columns(read(tmp_path, text))[1][0] == 1500 * 10**6
    assert columns(read(tmp_path, text, "plain"))[1][0] == 1500 * 10**9
    with pytest.raises(InputError, match="no column for the prompt"):
        read(tmp_path, text, "azure")


def test_zones_shift_and_nanoseconds_stay_exact(tmp_path: Path) -> None:
    head = "timestamp,input,output\n"
    text = head + "2024-01-01T01:00:00+01:00,1,1\n2024-01-01T00:00:00.000000001Z,1,1\n"
    assert read(tmp_path, text).arrival_ns.tolist() == [0, 1]
    text = "arrival_ns,input,output\n1759813207532900363,1,1\n1759813207532900365,1,1\n"
    assert read(tmp_path, text).arrival_ns.tolist() == [0, 2]


def test_limit_takes_the_first(tmp_path: Path) -> None:
    text = "arrival,input,output\n" + "".join(f"{i},{i + 1},1\n" for i in range(9))
    assert read(tmp_path, text, limit=3).prompt_tokens.tolist() == [1, 2, 3]


def test_disorder_is_sorted_with_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    path = written(tmp_path, "arrival,input,output\n5,1,1\n3,2,1\n5,3,1\n4,4,1\n")
    rows = read_trace(path, warnings.append)
    assert columns(rows) == [(0, 2, 1), (10**9, 4, 1), (2 * 10**9, 1, 1), (2 * 10**9, 3, 1)]
    assert warnings == [f"{path}: arrival goes backwards at 2 rows; sorted"]


def test_zero_lengths_count_as_one_with_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    path = written(tmp_path, "arrival,input,output\n1,0,0\n2,5,0\n")
    assert columns(read_trace(path, warnings.append)) == [(0, 1, 1), (10**9, 5, 1)]
    assert warnings == [
        f"{path}: input is 0 in 1 rows; counted as 1 token",
        f"{path}: output is 0 in 2 rows; counted as 1 token",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "t.csv: the trace is empty"),
        ("arrival,input,output\n", "t.csv: the trace is empty"),
        ("arrival,output\n1,2\n", "t.csv: no column for the prompt (prompt_tokens, input_tokens, "),
        ("arrival,prompt\n1,2\n", "t.csv: no column for the output (output_tokens, completion_"),
        ("when,prompt,output\n1,2,3\n", "columns found: when, prompt, output"),
        ("arrival,input,output\n1,2,3\n4,5", "t.csv:3: 2 fields, the header has 3 (cut short?)"),
        ("arrival,input,output\n1,2,3,4\n4,5,6", "t.csv:2: 4 fields, the header has 3"),
        ("arrival,input,output\n1,2,3\n\n4,nan,6", "t.csv:4: input is not a finite number: 'nan'"),
        ("arrival,input,output\n1,2,3\ninf,5,6", "t.csv:3: arrival is not a finite number: 'inf'"),
        ("arrival,input,output\n1,-2,3", "t.csv:2: input is negative: '-2'"),
        ("arrival,input,output\n1,2.5,3", "t.csv:2: input is not a whole number: '2.5'"),
        ("arrival,input,output\n1,2,99999999", "t.csv:2: output is above 10000000 tokens"),
        ("arrival,input,output\n1,2,x", "t.csv:2: output is not a finite number: 'x'"),
        ("arrival,input,output\n0,2,1\n1e300,2,1", "more than 146 years"),
        ("timestamp,input,output\n2024-01-01,2,1\nnow,2,1", "t.csv:3: timestamp is not a date"),
        ("timestamp,input,output\n2024-01-01,2,1\n2024-99-01,2,1", "t.csv:3: timestamp is not a d"),
        ('{"arrival": 1, "input": 2, "output": 3}\n{"arr', "t.csv:2: not a JSON object (cut short"),
        ('{"arrival": 1, "input": 2, "output": 3}\n7\n', "t.csv:2: not a JSON object"),
        ('{"arrival": 1, "input": 2, "output": 3}\n{"arrival": 1}', "t.csv:2: input is not a numb"),
        ('{"arrival": 1, "input": true, "output": 3}', "t.csv:1: input is not a number: True"),
        ('{"arrival": 1, "input": 2, "output": 3, "hash_ids": 5}', "hash_ids is not a list of blo"),
        ('[{"arrival": 1}]', "a JSON array; give one object a line"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.csv: cannot be read: No such file"):
        read_trace(tmp_path / "none.csv", pytest.fail)
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not UTF-8 text"):
        read_trace(tmp_path / "b.csv", pytest.fail)


@given(
    st.binary(max_size=200)
    | st.text(max_size=200).map(str.encode)
    | st.text('0123456789.,-+eE \n"xZ:T', max_size=80).map(
        lambda cells: b"timestamp,input,output\n" + cells.encode()
    )
)
@settings(deadline=None, max_examples=300)
def test_no_bytes_bring_a_traceback(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.csv"
    path.write_bytes(content)
    try:
        rows = read_trace(path, lambda _: None)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert (np.diff(rows.arrival_ns) >= 0).all()
        assert rows.arrival_ns[0] == 0


# Few ids, so that prompts meet; short blocks, so that ends fall inside and outside them.
_PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(1, 24)), min_size=1, max_size=8
)


@given(_PROMPTS, st.sampled_from([1, 2, 4]))
def test_requests_share_the_blocks_their_ids_share(
    prompts: list[tuple[list[int], int]], block_size: int
) -> None:
    """LAW: a KV block is common to two prompts exactly if its chain of ids is."""
    size = 4
    ids = [row for row, _ in prompts]
    # Ids cover whole blocks here; partly filled ones have their own test.
    tokens = np.array([max(length, size * len(row)) for row, length in prompts])
    shared, segments = share_blocks(ids, tokens, size)
    private = range(segments + 1, segments + 1 + len(ids))
    keys = [
        block_keys(private[i], shared[i], block_size, 0, int(tokens[i]) // block_size)
        for i in range(len(ids))
    ]
    for a in range(len(ids)):
        for b in range(a):
            common = 0
            while common < min(len(ids[a]), len(ids[b])) and ids[a][common] == ids[b][common]:
                common += 1
            same = set(keys[a]) & set(keys[b])
            assert same == set(list(keys[a])[: common * size // block_size])


def test_a_partly_filled_block_ends_with_the_prompt() -> None:
    shared, segments = share_blocks([[1, 2], [1, 2], [1]], np.array([700, 700, 600]), 512)
    assert shared == [((1, 512), (2, 700)), ((1, 512), (2, 700)), ((1, 512),)]
    assert segments == 2


def test_blocks_that_go_together_are_one_segment() -> None:
    long = list(range(100))
    shared, segments = share_blocks([long, long, [*long, 100]], np.array([1600, 1600, 1616]), 16)
    assert shared == [((1, 1600),)] * 3
    assert segments == 1


@needs_shared
@pytest.mark.parametrize(
    ("name", "count", "span_s", "prompt", "output", "limit_s"),
    [
        ("azure-2023/AzureLLMInferenceTrace_code.csv", 8819, 3435.948, 2047.848, 27.883, 0.3),
        ("azure-2023/AzureLLMInferenceTrace_conv.csv", 19366, 3501.722, 1154.697, 211.126, 0.3),
        ("mooncake/conversation_trace.jsonl", 12031, 3536.999, 12035.061, 342.619, 1.0),
    ],
)
def test_public_traces_are_read_whole(
    name: str, count: int, span_s: float, prompt: float, output: float, limit_s: float
) -> None:
    started = time.process_time()
    rows = read_trace(SHARED / "traces" / name, pytest.fail)
    assert time.process_time() - started < 3 * limit_s
    assert len(rows) == count
    assert rows.arrival_ns[-1] / 1e9 == pytest.approx(span_s, abs=1e-3)
    assert rows.prompt_tokens.mean() == pytest.approx(prompt, abs=1e-3)
    assert rows.output_tokens.mean() == pytest.approx(output, abs=1e-3)


@needs_shared
def test_mooncake_shares_what_its_ids_share() -> None:
    path = SHARED / "traces/mooncake/conversation_trace.jsonl"
    rows = read_trace(path, pytest.fail)
    assert rows.shared is not None
    seen: set[int] = set()
    by_ids = 0
    cached: set[int] = set()
    by_keys = 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for i, record in enumerate(records):
        whole = record["input_length"] // 512
        by_ids += sum(block in seen for block in record["hash_ids"][:whole])
        seen.update(record["hash_ids"][:whole])
        keys = block_keys(rows.segments + 1 + i, rows.shared[i], 512, 0, whole)
        by_keys += sum(key in cached for key in keys)
        cached.update(keys)
    assert by_keys == by_ids > 50_000


@needs_shared
@pytest.mark.parametrize("folder", ["RTX4090-Llama-3.1-8B", "RTXPRO6000-Llama-3.1-8B"])
def test_recorded_runs_are_read(folder: str) -> None:
    path = SHARED / "validation/llmservingsim" / folder / "vllm/requests.jsonl"
    rows = read_trace(path, pytest.fail)
    assert len(rows) == 300
    assert 29e9 < rows.arrival_ns[-1] < 30e9


@needs_shared
def test_every_sample_is_read() -> None:
    folder = SHARED / "validation/files/traces"
    for path in folder.glob("*head*"):
        assert len(read_trace(path, pytest.fail)) > 0
    for path in folder.glob("*.csv"):
        assert len(read_trace(path, pytest.fail)) > 0
