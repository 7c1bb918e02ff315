"""What the longest contexts of a batch cost: the law, who keeps count, and what was measured."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import small_csvs

from servecast.calibration import llmservingsim
from servecast.calibration.store import load_profile, profile_text
from servecast.costmodels.catalogue import load_hardware, load_model
from servecast.costmodels.errors import InputError
from servecast.costmodels.graphs import capture_sizes
from servecast.costmodels.kernels import Kernels, Tail, uncut_streams
from servecast.costmodels.kv_format import KvFormat
from servecast.costmodels.roofline import Roofline
from servecast.costmodels.shape import StepShape, tail_tokens
from servecast.scenarios.measured import completed, kernels_on
from servecast.sim.decodes import DecodeAggregate
from servecast.sim.sequence import Sequence

LLAMA = load_model("meta-llama/Llama-3.1-8B")
RTX_4090 = load_hardware("rtx-4090")

contexts = st.lists(st.integers(1, 400), min_size=1, max_size=30)


def told(tokens: list[int], sequences: int) -> int:
    longest = sorted(tokens)[-sequences:]
    return tail_tokens(longest, len(tokens), sum(tokens), sequences)


def read(tokens: list[int], sequences: int) -> int:
    """Token by token: while fewer than `sequences` are left, a token takes as long as theirs."""
    return sum(max(sum(own > at for own in tokens), sequences) for at in range(max(tokens)))


@given(contexts, st.integers(1, 40))
def test_the_law_is_what_is_left_of_memory(tokens: list[int], sequences: int) -> None:
    mean = sum(tokens) / len(tokens)
    even = max(len(tokens), sequences) * mean
    assert told(tokens, sequences) == int(read(tokens, sequences) - even + 1e-6)


@given(contexts, st.integers(1, 40), st.integers(0, 1000))
def test_it_stays_as_all_grow_alike(tokens: list[int], sequences: int, more: int) -> None:
    assert told([own + more for own in tokens], sequences) == told(tokens, sequences)


@given(st.integers(1, 400), st.integers(1, 30), st.integers(0, 40))
def test_equal_contexts_have_none(tokens: int, number: int, sequences: int) -> None:
    assert told([tokens] * number, sequences) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 300)), max_size=60), st.integers(0, 8))
def test_the_aggregate_knows_its_longest(moves: list[tuple[int, int]], tail: int) -> None:
    """Members join, leave and grow in any order."""
    decodes = DecodeAggregate(16, tail)
    members: list[Sequence] = []
    for number, (move, tokens) in enumerate(moves):
        if move < 3:
            seq = Sequence(number, tokens, 10_000, segment_id=number)
            seq.computed_tokens = tokens
            decodes.join(seq)
            members.append(seq)
        elif move == 3 and members:
            decodes.leave(members.pop(tokens % len(members)))
        else:
            decodes.tick += 1
        reads = sorted(seq.base + decodes.tick + 1 for seq in members)
        assert decodes.longest() == (reads[-tail:] if tail else [])
    decodes.dissolve()
    assert decodes.longest() == []


def measured_4090() -> Roofline:
    kernels = kernels_on(load_profile("rtx-4090"), RTX_4090)
    return Roofline(
        model=LLAMA, hardware=RTX_4090, measured=kernels, cuda_graph_sizes=capture_sizes(256, 2048)
    )


@given(st.integers(1, 80), st.integers(1, 300_000), st.integers(1, 60), st.integers(0, 50_000))
def test_a_jump_with_a_tail_is_its_steps_bit_for_bit(
    decodes: int, context: int, steps: int, tail: int
) -> None:
    priced = measured_4090().decode(decodes)
    one_by_one = [priced.steps_ns(context + j * decodes, 1, tail)[0] for j in range(steps)]
    assert list(priced.steps_ns(context, steps, tail)) == one_by_one
    cost = priced.cost(context, tail)
    assert abs(one_by_one[0] - cost.total_ns) <= 1
    longer = cost.attention_decode_s - priced.cost(context).attention_decode_s
    # FlashAttention 2 cuts long sequences up as long as they are few.
    seen = decodes * 8 >= uncut_streams(RTX_4090.multiprocessors)
    assert longer == pytest.approx(tail * priced_token_s(decodes) if seen else 0.0, abs=1e-12)


def priced_token_s(decodes: int) -> float:
    tail = load_profile("rtx-4090").tail
    assert tail is not None
    share = tail.share(decodes * 8, False, RTX_4090.multiprocessors)
    token_bytes = 2 * 8 * 128 * 2
    return LLAMA.num_layers * share * token_bytes / RTX_4090.memory_bandwidth_bytes_per_s


def test_beside_a_prompt_nothing_is_cut_up() -> None:
    cost = measured_4090()
    even = StepShape(((512, 0),), 4, 4, 4000, 5)
    uneven = even._replace(decode_tail_tokens=9000)
    assert cost.tail_sequences == 8  # 68 streams of 8 heads
    assert cost.step(uneven).total_s > cost.step(even).total_s
    alone = StepShape((), 4, 4, 4000, 4)
    assert cost.step(alone._replace(decode_tail_tokens=3000)) == cost.step(alone)


@given(st.integers(1, 7), st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 3000))
def test_beside_a_prompt_longer_contexts_never_take_less(
    others: int, short: int, longest: int, more: int
) -> None:
    """Also where sequences are so few that memory is never the bound."""
    cost = measured_4090()

    def attention_s(contexts: list[int]) -> float:
        n, sequences = len(contexts), cost.tail_sequences
        tail = tail_tokens(sorted(contexts)[-sequences:], n, sum(contexts), sequences)
        shape = StepShape(((256, 0),), n, n, sum(contexts), n + 1, decode_tail_tokens=tail)
        return cost.step(shape).attention_decode_s

    before = attention_s([longest, *[short] * others])
    after = attention_s([longest + more, *[short + more] * others])
    assert after >= before * (1 - 1e-9)


def test_what_has_no_tail() -> None:
    kernels = kernels_on(load_profile("rtx-4090"), RTX_4090)
    for kv, measured in (
        (KvFormat("fp8", 8), kernels),
        (KvFormat("float32", 32), kernels),
        (
            KvFormat("bfloat16", 16),
            replace(kernels, packed={16: next(iter(kernels.decode.values()))}),
        ),
    ):
        cost = Roofline(model=LLAMA, hardware=RTX_4090, measured=measured, kv=kv)
        assert cost.tail_sequences == 0


def test_shares_are_straight_between_and_fall_beyond() -> None:
    tail = Tail(64.0, {512: 1.0, 1024: 0.5}, {})
    assert tail.share(512, False, 100) == 1.0
    assert tail.share(724, False, 100) == pytest.approx(0.75, abs=1e-3)
    assert tail.share(4096, False, 100) == pytest.approx(0.125)
    assert tail.share(159, False, 100) == 0.0 and tail.share(160, False, 100) == 1.0
    # Without figures of their own, decodes beside a prompt are in a kernel of their own.
    assert tail.share(512, True, 100) == 1.0
    assert tail.share(512, False, 0) == 0.0


# --- whose it is


def of(name: str, profile: str | None = None) -> Kernels:
    hardware = load_hardware(name)
    return kernels_on(completed(load_profile(profile or name), hardware), hardware)


def test_where_flash_attention_2_runs_there_is_a_tail() -> None:
    assert of("rtx-4090").tail == load_profile("rtx-4090").tail
    theirs = load_profile("rtx-pro-6000-llmservingsim").tail
    assert theirs is not None
    assert of("a100-sxm-80gb").tail == of("l40s").tail == of("rtx-pro-6000").tail == theirs
    assert of("h100-sxm").tail is None and of("b200").tail is None


def test_a_device_keeps_its_own_tail(tmp_path: Path) -> None:
    """In a profile of one's own that has not measured it."""
    path = tmp_path / "mine.yaml"
    path.write_text(profile_text(replace(load_profile("rtx-4090"), tail=None)))
    assert load_profile(str(path)).tail is None
    assert of("rtx-4090", str(path)).tail == load_profile("rtx-4090").tail


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("streams: 68.0", "streams: 0"),
        ("streams: 68.0", "streams: .nan"),
        ("streams: 68.0\n", "fed: 68.0\n"),
        ("    256: 0.8", "    256: -0.8"),
        ("    256: 0.8", "    0: 0.8"),
        ("  alone:\n", "  alone: 3\n  x:\n"),
    ],
)
def test_what_is_no_tail(tmp_path: Path, old: str, new: str) -> None:
    text = profile_text(load_profile("rtx-4090"))
    head, tail = text[: text.index("\ntail:")], text[text.index("\ntail:") :]
    path = tmp_path / "p.yaml"
    path.write_text(head + tail.replace(old, new, 1))
    with pytest.raises(InputError, match=r"p\.yaml: not a profile"):
        load_profile(str(path))


# --- from tables

FED, SHORT = 64, 1000


def skewed(folder: Path, seen: float = 0.5) -> None:
    """Tables of batches on a device that feeds 64 streams; times of three iterations."""
    split = folder / "RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1"
    own, layer = 8, 2 * 128 * 2 / RTX_4090.memory_bandwidth_bytes_per_s * 1e6
    names = "regime,n,nb,ratio,skew,pc,kp,kvs,kv_big,kv_mean,t_mean_us,t_max_us,t_skew_us,alpha"
    rows = []
    with (split / "attention.csv").open("a") as file:
        for n in (2, 4, 16, 32, 64):
            longest = 4 * SHORT
            most_us = own * n * longest * layer
            file.write(f"0,0,{n},{longest},{most_us}\n")
            for nb in (1, 2, 4):
                if nb >= n:
                    continue
                total = nb * longest + (n - nb) * SHORT
                even = max(own * n, FED) / n * total
                uneven = sum(max(own * n, FED) for _ in range(SHORT))
                uneven += max(own * nb, FED) * (longest - SHORT)
                for regime, share in (("pure", seen), ("mixed", 1.0)):
                    us = [even * layer, most_us, (even + share * (uneven - even)) * layer]
                    times = ",".join(str(3 * one) for one in us)
                    rows.append(
                        f"{regime},{n},{nb},0,4,0,0,{SHORT},{longest},{total / n},{times},0"
                    )
    (split / "skew.csv").write_text("\n".join([names, *rows]) + "\n")


def test_a_tail_is_found_in_tables(tmp_path: Path) -> None:
    small_csvs(tmp_path)
    skewed(tmp_path)
    tail = llmservingsim.fit_system(tmp_path / "RTX4090", RTX_4090, "x").tail
    assert tail is not None and tail.streams == FED
    assert tail.alone == pytest.approx({256: 0.5, 512: 0.5}, rel=1e-3)
    assert tail.beside_prompt == pytest.approx(
        dict.fromkeys((16, 32, 128, 256, 512), 1.0), rel=1e-3
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("regime,", "regimes,", r"skew\.csv: not a table"),
        ("4000,", "4001,", r"skew\.csv: no batch of decodes that attention\.csv has too"),
        (",0\n", ",x\n", None),
    ],
)
def test_a_damaged_table_of_uneven_batches(
    tmp_path: Path, old: str, new: str, message: str | None
) -> None:
    path = small_csvs(tmp_path) / "skew.csv"
    skewed(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    if message is None:  # a column that nobody reads
        assert llmservingsim.fit_system(tmp_path / "RTX4090", RTX_4090, "x").tail is not None
        return
    with pytest.raises(InputError, match=message):
        llmservingsim.fit_system(tmp_path / "RTX4090", RTX_4090, "x")
