"""vLLM's start-up logs, V0 and V1, 0.6 to 0.32: figures, failures, and no traceback."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servecast.costmodels.catalogue import load_model
from servecast.costmodels.errors import InputError
from servecast.costmodels.kv_format import BFLOAT16
from servecast.costmodels.kv_layout import kv_layout
from servecast.costmodels.memory import EngineMemory
from servecast.costmodels.versions import Version
from servecast.scenarios.bootlog import BootLog, parse_boot_log, read_boot_log

LOGS = Path(__file__).parents[1].parent / "shared/validation/files/vllm_logs"

#: 0.6.5 to 0.10.2, engine V0: GB that is GiB, no blank before the unit, no bracket.
V0 = """\
INFO 12-22 10:55:20 llm_engine.py:249] Initializing an LLM engine (v0.6.5) with config: model='a/b'
INFO 12-22 10:55:34 model_runner.py:1097] Loading model weights took 8.5107 GB
INFO 12-22 10:55:34 worker.py:241] Memory profiling takes 0.69 seconds
INFO 12-22 10:55:34 worker.py:241] the current vLLM instance can use total_gpu_memory (79.25GiB) \
x gpu_memory_utilization (0.15) = 11.89GiB
INFO 12-22 10:55:34 worker.py:241] model weights take 8.51GiB; non_torch_memory takes 0.26GiB; \
PyTorch activation peak memory takes 0.94GiB; the rest of the memory reserved for KV Cache is \
2.18GiB.
INFO 12-22 10:55:35 gpu_executor.py:76] # GPU blocks: 715, # CPU blocks: 1310
INFO 12-22 10:55:35 gpu_executor.py:80] Maximum concurrency for 2048 tokens per request: 5.59x
INFO 12-22 10:55:45 model_runner.py:1527] Graph capturing finished in 7 secs, took 0.27 GiB
"""

#: 0.6.4: everything on one line, and a peak that includes the weights.
V064 = """\
INFO 12-02 10:00:00 llm_engine.py:249] Initializing an LLM engine (v0.6.4.post1) with config: x
INFO 12-02 10:00:10 model_runner.py:1077] Loading model weights took 14.9888 GB
INFO 12-02 10:00:12 worker.py:232] Memory profiling results: total_gpu_memory=23.58GiB \
initial_memory_usage=0.33GiB peak_torch_memory=17.98GiB memory_usage_post_profile=15.40GiB \
non_torch_memory=0.35GiB kv_cache_size=2.89GiB gpu_memory_utilization=0.90
INFO 12-02 10:00:12 gpu_executor.py:113] # GPU blocks: 1478, # CPU blocks: 2048
ERROR The model's max seq len (29000) is larger than the maximum number of tokens that can be \
stored in KV cache (23648). Try increasing `gpu_memory_utilization`
"""

#: 0.22, colours without their escape character, a container's prefix, two ranks.
V1 = """\
vllm-1  | [1;36m(APIServer pid=1)[0;0m INFO 09-03 03:38:43 non-default args: {'model': \
'Qwen/Qwen2.5-7B-Instruct', 'max_model_len': 4096, 'gpu_memory_utilization': 0.95}
vllm-1  | (EngineCore pid=7) INFO [core.py:112] Initializing a V1 LLM engine (v0.22.0) with \
config: model='Qwen/Qwen2.5-7B-Instruct', max_seq_len=4096, tensor_parallel_size=2, \
enforce_eager=False, kv_cache_dtype=auto
vllm-1  | (Worker_TP0) INFO [gpu_model_runner.py:5132] Model loading took 7.12 GiB memory and 4.6 s
vllm-1  | (Worker_TP1) INFO [kv_cache_utils.py:829] Overriding num_gpu_blocks=0 with \
num_gpu_blocks_override=512
vllm-1  | (Worker_TP0) INFO [gpu_model_runner.py:6365] Estimated CUDA graph memory: 0.37 GiB total
vllm-1  | (Worker_TP0) INFO [gpu_worker.py:466] Available KV cache memory: 26.32 GiB
vllm-1  | (Worker_TP1) INFO [gpu_worker.py:466] Available KV cache memory: 26.3 GiB
vllm-1  | (EngineCore pid=7) INFO [kv_cache_utils.py:1733] GPU KV cache size: 492,912 tokens
vllm-1  | (EngineCore pid=7) INFO Maximum concurrency for 4,096 tokens per request: 120.34x
vllm-1  | (Worker_TP0) INFO [gpu_worker.py:619] CUDA graph pool memory: 0.31 GiB (actual), 0.37 \
GiB (estimated), difference: 0.05 GiB (17.4%).
"""

#: 0.28 and on: tokens and concurrency on one line, weights and non-torch together.
V128 = """\
(EngineCore pid=1) INFO Initializing a V1 LLM engine (v0.29.0) with config: model='m/m'
(EngineCore pid=1) INFO GPU KV cache size: 437,337 tokens, Maximum concurrency for 262,144 tokens \
per request: 1.67x
(EngineCore pid=1) INFO Free memory on device (22.93/23.56 GiB) on startup. Desired GPU memory \
utilization is (0.935, 22.03 GiB). Actual usage is 19.47 GiB for consumed memory (weights + \
non-torch), 0.6 GiB for peak activation, and 0.1 GiB for CUDAGraph memory.
"""


def test_v0() -> None:
    log = parse_boot_log(V0)
    assert log.v0 and log.version == Version(0, 6, 5)
    assert (log.weights_gib, log.activation_gib, log.other_gib) == (8.5107, 0.94, 0.26) or (
        log.weights_gib == 8.51
    )
    assert (log.kv_gib, log.graph_gib, log.total_gib) == (2.18, 0.27, 79.25)
    assert (log.blocks, log.max_concurrency, log.max_model_len) == (715, 5.59, 2048)
    assert log.gpu_memory_utilization == 0.15
    assert log.failure is None


def test_v0_of_0_6_4_and_its_failure() -> None:
    log = parse_boot_log(V064)
    assert log.version == Version(0, 6, 4)
    assert log.activation_gib == pytest.approx(2.99, abs=0.01)
    assert (log.other_gib, log.kv_gib, log.blocks) == (0.35, 2.89, 1478)
    assert log.failure is not None and "(29000) is larger" in log.failure
    with pytest.raises(InputError, match="did not start"):
        log.pool_blocks(EngineMemory(), kv_layout(load_model("Llama-3.1-8B"), BFLOAT16))


def test_v1_with_colours_prefixes_and_ranks() -> None:
    log = parse_boot_log(V1)
    assert not log.v0 and log.version == Version(0, 22)
    assert log.model == "Qwen/Qwen2.5-7B-Instruct"
    assert (log.weights_gib, log.kv_gib) == (7.12, 26.3)  # the rank with least room rules
    assert (log.graph_estimate_gib, log.graph_gib) == (0.37, 0.31)
    assert (log.tokens, log.max_concurrency, log.max_model_len) == (492_912, 120.34, 4096)
    assert log.blocks is None  # 512 is the pool that graphs are profiled in
    assert (log.tensor_parallel_size, log.enforce_eager) == (2, False)
    assert log.gpu_memory_utilization == 0.95


def test_one_line_of_0_28() -> None:
    log = parse_boot_log(V128)
    assert (log.tokens, log.max_model_len, log.max_concurrency) == (437_337, 262_144, 1.67)
    assert (log.free_gib, log.total_gib) == (22.93, 23.56)
    assert (log.other_gib, log.activation_gib) == (None, None)  # parts of sums that are not told


def test_weights_and_non_torch_memory_told_as_one() -> None:
    told = "INFO Model loading took 18.5 GiB\nINFO Estimated CUDA graph memory: 0.2 GiB total\n"
    log = parse_boot_log(V128 + told)
    assert (log.weights_gib, log.other_gib, log.activation_gib) == (18.5, 0.97, 0.4)
    debug = (
        "Memory profiling takes 3 seconds. Total non KV cache memory: 63.5GiB; torch peak memory "
        "increase: 2.04GiB; total consumed (from mem_get_info): 61.49GiB; weights memory: 55.87GiB."
    )
    log = parse_boot_log(debug)
    assert (log.weights_gib, log.other_gib, log.activation_gib) == (55.87, 5.62, 2.04)


def test_flags_of_the_engine_s_own_line() -> None:
    log = parse_boot_log(
        "Initializing a V1 LLM engine (v0.19.0) with config: model='m/m', dtype=torch.bfloat16, "
        "quantization=mxfp4, enforce_eager=True, kv_cache_dtype=fp8, enable_prefix_caching=False"
    )
    assert (log.dtype, log.quantization, log.kv_cache_dtype) == ("bfloat16", "mxfp4", "fp8")
    assert (log.enforce_eager, log.enable_prefix_caching) == (True, False)
    other = parse_boot_log("non-default args: {'model': 'a/b'} quantization=compressed-tensors,")
    assert (other.model, other.quantization) == ("a/b", "compressed-tensors")
    assert parse_boot_log("kv_cache_dtype=auto, quantization=None").kv_cache_dtype is None


@pytest.mark.parametrize(
    ("line", "blocks"),
    [
        ("# cuda blocks: 190100, # CPU blocks: 17", 190_100),
        ("# GPU blocks: 33660", 33_660),
        ("# TPU/CPU blocks: 12", 12),
        ("# CPU blocks: 9", 9),
    ],
)
def test_swap_space_is_no_kv_pool(line: str, blocks: int) -> None:
    assert parse_boot_log(line).blocks == blocks


def test_what_goes_wrong_while_it_serves_is_no_failed_start() -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB\n"
    assert parse_boot_log(V1 + oom).failure is not None
    assert parse_boot_log(V1 + "INFO: Application startup complete.\n" + oom).failure is None


def test_a_failure_tells_the_pool() -> None:
    log = parse_boot_log(
        "ValueError: To serve at least one request with the models's max seq len (262144), "
        "(11.75 GiB KV cache is needed, which is larger than the available KV cache memory "
        "(8.03 GiB). Based on the available memory, the estimated maximum model length is 57344."
    )
    assert log.kv_gib == 8.03
    assert log.failure is not None


def test_graphs_of_a_draft_and_of_an_encoder() -> None:
    log = parse_boot_log(
        "Graph capturing finished in 5 secs / 3 secs, took 0.81 GiB\n"
        "Encoder graph capturing finished in 2 secs, took 3.00 GiB (4 graphs)\n"
    )
    assert log.graph_gib == 0.81


def test_the_last_of_several_starts_counts() -> None:
    log = parse_boot_log(V064 + V0.replace("715", "716"))
    assert log.blocks == 716
    assert log.failure is None


def test_the_pool_of_a_log() -> None:
    model = load_model("Qwen2.5-7B-Instruct")
    layout = kv_layout(model, BFLOAT16, tensor=2)
    engine = EngineMemory(max_model_len=4096, tensor=2)
    assert parse_boot_log(V0).pool_blocks(engine, layout) == 715
    blocks = parse_boot_log(V1).pool_blocks(engine, layout)
    assert blocks * 16 == pytest.approx(492_912, abs=16)
    assert BootLog(kv_gib=1.0).pool_blocks(engine, layout) == 2**30 // layout.block_bytes
    with pytest.raises(InputError, match="no KV blocks"):
        BootLog(weights_gib=1.0).pool_blocks(engine, layout)


@pytest.mark.skipif(not LOGS.exists(), reason="shared logs not here")
def test_real_logs() -> None:
    llama = read_boot_log(LOGS / "boot_llama70b_fp8_tp2_v0.19.0_debug.log")
    assert (llama.blocks, llama.tokens) == (15_269, 244_304)
    assert (llama.weights_gib, llama.activation_gib, llama.other_gib) == (33.88, 1.96, 2.1)
    oom = read_boot_log(LOGS / "boot_gptoss20b_oom_after_kv_v0.19.0.log")
    assert oom.tokens == 1_277_184
    assert oom.failure is not None and oom.failure.startswith("CUDA out of memory")
    cut = read_boot_log(LOGS / "boot_qwen2_7b_tp1_util025_v0.10.1.1.log")
    assert (cut.tokens, cut.blocks) == (93_872, None)
    refused = read_boot_log(LOGS / "serve_max_model_len_rejected_v0.25.1.log")
    assert refused.failure is not None and "999999" in refused.failure


def test_files_that_say_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("hello\n")
    with pytest.raises(InputError, match=r"x\.log: no line of a vLLM start-up"):
        read_boot_log(path)
    with pytest.raises(InputError, match=r"none\.log: cannot be read"):
        read_boot_log(tmp_path / "none.log")
    with pytest.raises(InputError, match="cannot be read"):
        read_boot_log(tmp_path)


def test_a_file_without_an_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever size a file claims (a device says 0), no more than the limit is read."""
    monkeypatch.setattr("servecast.scenarios.bootlog.MAX_BYTES", 1000)
    with pytest.raises(InputError, match="/dev/zero: 1001 bytes is too large, at most 1000"):
        read_boot_log(Path("/dev/zero"))


@given(st.binary(max_size=400))
def test_any_bytes_are_a_log_or_refused(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    path = tmp_path_factory.mktemp("log") / "any.log"
    path.write_bytes(raw)
    try:
        read_boot_log(path)
    except InputError as error:
        assert str(path) in str(error)


@given(
    st.sampled_from([V0, V064, V1, V128]),
    st.integers(0, 1200),
    st.integers(0, 60),
    st.text(max_size=30),
)
def test_a_damaged_log_never_raises(text: str, at: int, length: int, other: str) -> None:
    log = parse_boot_log(text[:at] + other + text[at + length :])
    assert isinstance(log, BootLog)
