"""The roofline's laws: never faster than the datasheet, monotone, one answer by every path."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servecast.costmodels.catalogue import load_hardware, load_model
from servecast.costmodels.collectives import all_gather_s, all_reduce_s
from servecast.costmodels.efficiency import DATASHEET, UNCALIBRATED, Efficiency
from servecast.costmodels.graphs import capture_sizes
from servecast.costmodels.operators import window_pairs
from servecast.costmodels.quantization import with_quantization
from servecast.costmodels.roofline import Roofline
from servecast.costmodels.shape import CostModel, StepCost, StepShape
from servecast.costmodels.specs import Parallelism

H100 = load_hardware("h100-sxm")
LLAMA = load_model("Llama-3.1-8B")
SIZES = capture_sizes(256, 8192)


def roofline(name: str, hardware: str, tensor: int, async_scheduling: bool = True) -> Roofline:
    return Roofline(
        model=load_model(name),
        hardware=load_hardware(hardware),
        parallel=Parallelism(tensor),
        host_s=2e-3,
        async_scheduling=async_scheduling,
        cuda_graph_sizes=SIZES,
    )


ROOFLINES: list[Roofline] = [
    roofline("Llama-3.1-8B", "h100-sxm", 1),
    roofline("Llama-3.1-8B", "rtx-4090", 1, async_scheduling=False),
    roofline("Qwen3-0.6B", "b200", 1),
    roofline("Mixtral-8x7B", "a100-sxm-80gb", 2),
    roofline("DeepSeek-V3", "h200-sxm", 8),
    roofline("gemma-3-12b", "l40s", 2),
    roofline("gpt-oss-20b", "h100-sxm", 1, async_scheduling=False),
    roofline("opt-125m", "cpu", 1),
]

models = st.sampled_from(ROOFLINES)
chunks = st.lists(st.tuples(st.integers(1, 2048), st.integers(0, 8192)), max_size=3)


@st.composite
def shapes(draw: st.DrawFn) -> StepShape:
    """A step with at least one token, whose decodes have at least a token of context each."""
    prefills = tuple(draw(chunks))
    decodes = draw(st.integers(0 if prefills else 1, 300))
    query = draw(st.integers(1, 4))
    context = draw(st.integers(1, 4000)) * decodes * query
    sampled = draw(st.integers(0, decodes * query + len(prefills)))
    return StepShape(prefills, decodes, decodes * query, context, sampled)


# --- laws


@given(models, shapes())
def test_no_step_beats_the_datasheet(model: Roofline, shape: StepShape) -> None:
    """Nor is any part of a step negative."""
    cost = model.step(shape)
    assert all(part >= 0 for part in cost)
    assert cost.total_s > 0
    device = model.hardware
    peak = max(device.peak_flops_per_s(kind) for kind in ("16bit", "fp8", "int8", "fp4"))
    assert cost.total_s >= cost.flops / peak
    assert cost.total_s >= cost.bytes / device.memory_bandwidth_bytes_per_s


@given(shapes(), st.sampled_from([DATASHEET, Efficiency()]))
def test_work_is_all_of_the_model_s(shape: StepShape, efficiency: Efficiency) -> None:
    """FLOPs and bytes of a dense model, counted by hand: three SwiGLU matrices, not two."""
    m = LLAMA
    layer = m.hidden_size * (2 * m.hidden_size + 2 * 1024) + 3 * m.hidden_size * m.intermediate_size
    head = m.hidden_size * m.vocab_size
    tokens = shape.decode_tokens + sum(new for new, _ in shape.prefills)
    pairs = sum(sum(before + i for i in range(1, new + 1)) for new, before in shape.prefills)
    if shape.decodes:
        pairs += shape.decode_context_tokens * shape.decode_tokens // shape.decodes
    flops = 2 * 32 * layer * tokens + 2 * head * shape.sampled + 32 * 4 * 4096 * pairs
    read = shape.decode_context_tokens + sum(map(sum, shape.prefills))
    size = 2 * 32 * layer + 131_072 * read + (2 * head if shape.sampled else 0)
    cost = Roofline(model=m, hardware=H100, efficiency=efficiency, cuda_graph_sizes=SIZES).step(
        shape
    )
    assert cost.flops == pytest.approx(flops, rel=1e-12)
    assert cost.bytes == pytest.approx(size, rel=1e-12)
    assert cost.total_s >= max(flops / 989e12, size / 3350e9)


@given(models, shapes(), st.integers(0, 3), st.integers(1, 500))
def test_more_work_never_takes_less_time(
    model: Roofline, shape: StepShape, which: int, more: int
) -> None:
    prefills, decodes, tokens, context, sampled = shape[:5]
    bigger = (
        StepShape((*prefills, (more, 0)), decodes, tokens, context, sampled),
        StepShape(prefills, decodes, tokens, context + more if decodes else 0, sampled),
        StepShape(prefills, decodes, tokens, context, sampled + more),
        StepShape(tuple((n, c + more) for n, c in prefills), decodes, tokens, context, sampled),
    )[which]
    assert model.step(bigger).total_s >= model.step(shape).total_s * (1 - 1e-12)


@given(models, st.integers(1, 400), st.integers(1, 3000), st.integers(1, 100))
def test_more_sequences_never_take_less_time(
    model: Roofline, decodes: int, context: int, more: int
) -> None:
    fewer = model.decode(decodes).cost(decodes * context).total_s
    longer = model.decode(decodes + more).cost((decodes + more) * context).total_s
    assert longer >= fewer * (1 - 1e-12)


@given(models, st.integers(1, 400), st.integers(1, 5000))
def test_decode_is_the_step_it_stands_for(model: Roofline, decodes: int, mean: int) -> None:
    context = decodes * mean
    priced = model.decode(decodes)
    step = model.step(StepShape((), decodes, decodes, context, decodes))
    assert priced.cost(context) == step
    assert abs(priced.steps_ns(context, 1)[0] - step.total_ns) <= 1


@given(models, st.integers(1, 300), st.integers(1, 300_000), st.integers(1, 60))
def test_a_jump_is_its_steps_bit_for_bit(
    model: Roofline, decodes: int, context: int, steps: int
) -> None:
    priced = model.decode(decodes)
    one_by_one = [priced.steps_ns(context + j * decodes, 1)[0] for j in range(steps)]
    jump = priced.steps_ns(context, steps)
    assert list(jump) == one_by_one
    assert all(isinstance(ns, int | np.int64) for ns in jump)
    assert one_by_one == sorted(one_by_one)


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 200))
def test_window_pairs_are_counted(new: int, context: int, window: int) -> None:
    assert window_pairs(new, context, window) == sum(
        min(context + i, window) for i in range(1, new + 1)
    )


# --- parts


def test_host_time_hides_behind_the_device_when_async() -> None:
    shape = StepShape((), 8, 8, 8000, 8)

    def cost(host_s: float, async_scheduling: bool) -> StepCost:
        return Roofline(
            model=LLAMA,
            hardware=H100,
            host_s=host_s,
            async_scheduling=async_scheduling,
            cuda_graph_sizes=SIZES,
        ).step(shape)

    device_s = cost(0.0, True).total_s
    assert cost(1e-3, True).total_s == device_s
    assert cost(1e-3, False).total_s == pytest.approx(device_s + 1e-3)
    slow = cost(50e-3, True)
    assert slow.total_s == pytest.approx(50e-3)
    assert slow.host_s == pytest.approx(50e-3 - device_s)


def test_eager_steps_wait_for_their_launches() -> None:
    """0.8 ms a layer, whatever the load (vllm-project/vllm-omni#7960, vllm-project/vllm#42058)."""
    shape = StepShape((), 1, 1, 100, 1)
    eager = Roofline(model=LLAMA, hardware=H100).step(shape)
    graph = Roofline(model=LLAMA, hardware=H100, cuda_graph_sizes=SIZES).step(shape)
    assert eager.total_s == pytest.approx(0.8e-3 * LLAMA.num_layers, rel=0.05)
    assert eager.total_s > 2 * graph.total_s


def test_padding_costs_time_but_is_no_work() -> None:
    model = ROOFLINES[0]
    nine, sixteen = model.step(StepShape((), 9, 9, 9, 0)), model.step(StepShape((), 16, 16, 16, 0))
    assert nine.gemm_s == sixteen.gemm_s
    assert nine.flops < sixteen.flops


def test_experts_are_touched_as_expected() -> None:
    """Two of eight experts for one token, nearly all for thirty-two."""
    model = roofline("Mixtral-8x7B", "h100-sxm", 1)
    one = model.step(StepShape((), 1, 1, 1, 0)).bytes
    many = model.step(StepShape((), 32, 32, 32, 0)).bytes
    expert = 3 * 4096 * 14336 * 2 * 32
    rest = one - 2 * expert
    assert many == pytest.approx(rest + 8 * (1 - 0.75**32) * expert, rel=1e-3)


def test_a_sliding_window_caps_what_a_decode_reads() -> None:
    decode = roofline("Mistral-7B-v0.1", "h100-sxm", 1).decode(4)
    assert decode.cost(4 * 4096).attention_decode_s == decode.cost(4 * 30000).attention_decode_s
    assert decode.cost(4 * 2048).attention_decode_s < decode.cost(4 * 4096).attention_decode_s


def test_eight_bits_halve_what_a_decode_reads() -> None:
    shape = StepShape((), 1, 1, 1, 0)
    fp8 = Roofline(model=with_quantization(LLAMA, "fp8"), hardware=H100, efficiency=DATASHEET)
    bf16 = Roofline(model=LLAMA, hardware=H100, efficiency=DATASHEET)
    assert fp8.step(shape).gemm_s == pytest.approx(bf16.step(shape).gemm_s / 2, rel=0.01)


def test_ranks_share_the_work_and_pay_for_it() -> None:
    one, four = (roofline("Llama-3.1-70B", "h200-sxm", ranks) for ranks in (1, 4))
    shape = StepShape(((1024, 0),), 16, 16, 16000, 17)
    whole, share = one.step(shape), four.step(shape)
    assert share.flops == pytest.approx(whole.flops / 4, rel=1e-3)
    assert whole.collective_s == 0 < share.collective_s
    assert whole.total_s / 4 < share.total_s < whole.total_s


def test_a_pipeline_does_not_shorten_a_step() -> None:
    model = load_model("Llama-3.1-70B")
    shape = StepShape((), 16, 16, 16000, 0)
    one = Roofline(model=model, hardware=H100, cuda_graph_sizes=SIZES).step(shape)
    two = Roofline(
        model=model, hardware=H100, parallel=Parallelism(1, 2), cuda_graph_sizes=SIZES
    ).step(shape)
    assert two.total_s > one.total_s
    assert two.flops == one.flops / 2


def test_collectives() -> None:
    assert all_reduce_s(1e9, 1, 1e9, 1e-6) == 0
    assert all_reduce_s(1e9, 4, 1e9, 0.0) == pytest.approx(1.5)
    assert all_gather_s(1e9, 4, 1e9, 0.25) == pytest.approx(1.0)


def test_defaults_say_what_they_are() -> None:
    assert Efficiency().label == UNCALIBRATED
    with pytest.raises(ValueError, match=r"gemm_flops must be in \(0, 1\]: 1.5"):
        Efficiency(gemm_flops=1.5)
    with pytest.raises(ValueError, match="launch_s must not be negative"):
        Efficiency(launch_s=-1.0)
    with pytest.raises(ValueError, match="at least one token"):
        ROOFLINES[0].step(StepShape())


def test_it_is_a_cost_model() -> None:
    model: CostModel = ROOFLINES[0]
    assert model.decode(3) is model.decode(3)
