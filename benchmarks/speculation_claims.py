"""The claims about speculative decoding in circulation, each served by a bundled scenario.

    python benchmarks/speculation_claims.py

Every line is one run and the same load, with the same seed, without speculation: how many times the
throughput, how many times as fast (mean gap of a request; end to end, mean and P95), what was
accepted, and the gaps between deliveries beside the mean gap of a request.
"""

from pathlib import Path

from servecast.scenarios.load import load_scenario
from servecast.scenarios.run import run

LIBRARY = Path(__file__).parents[1] / "scenarios" / "library"

CONFIG = "engine.speculative_config"
CLIENTS = ("workload.arrivals.concurrency", "workload.arrivals.requests")

#: Claim, scenario, and overrides of each line.
CLAIMS: tuple[tuple[str, str, tuple[tuple[str, ...], ...]], ...] = (
    ("throughput 1.4 to 1.6 with a good draft", "good-draft-h100", ((),)),
    ("0.85 to 0.95 with a bad one, latency + 10 %", "bad-draft-h100", ((),)),
    ("0.7 to 0.8 where memory is short", "memory-rtx-4090", ((),)),
    (
        "latency of a single request - 30 to 50 %",
        "single-request-h100",
        ((), (f"{CONFIG}.method=eagle",), (f"{CONFIG}.method=ngram",)),
    ),
    (
        "k of 8 is not better than 5",
        "good-draft-h100",
        tuple(
            (f"{CONFIG}.num_speculative_tokens={k}", f"{CONFIG}.acceptance.alpha={alpha}")
            for alpha in (0.65, 0.9)
            for k in (3, 5, 8)
        ),
    ),
    (
        "an acceptance of 30 % loses 15 %, over 60 % wins",
        "good-draft-h100",
        tuple((f"{CONFIG}.acceptance.alpha={alpha}",) for alpha in (0.2, 0.3, 0.4, 0.5, 0.6, 0.8)),
    ),
    (
        "speed-ups of 2 to 3",
        "draft-size-h100",
        tuple((f"{CONFIG}.acceptance.alpha={alpha}",) for alpha in (0.7, 0.8, 0.9)),
    ),
    (
        "speed-ups of 2 to 6.5",
        "single-request-h100",
        (
            (f"{CONFIG}.acceptance={{kind: iid, alpha: 0.8}}",),
            (
                f"{CONFIG}.num_speculative_tokens=8",
                f"{CONFIG}.acceptance={{kind: iid, alpha: 0.9}}",
            ),
            (
                f"{CONFIG}.num_speculative_tokens=10",
                f"{CONFIG}.acceptance={{kind: iid, alpha: 0.97}}",
            ),
        ),
    ),
    (
        "a draft 10 to 20 times smaller, or of 20 to 30 % of the target",
        "draft-size-h100",
        ((), (f"{CONFIG}.model=Qwen/Qwen2.5-14B",), (f"{CONFIG}.model=Qwen/Qwen2.5-32B",)),
    ),
    (
        "the mean falls while P95 rises; slower at a large batch",
        "batch-h100",
        tuple(
            (
                f"{CLIENTS[0]}={clients}",
                f"{CLIENTS[1]}={10 * clients}",
                f"{CONFIG}.num_speculative_tokens={k}",
            )
            for clients in (1, 64, 256)
            for k in (1, 4, 8)
        ),
    ),
    (
        "twice as fast at batches of 32 to 256 with contexts of 32k",
        "long-context-h100",
        tuple((f"workload.arrivals.requests={n}",) for n in (32, 64, 96)),
    ),
    (
        "MTP at k = 8: gaps of 22 to 160 ms while TPOT falls",
        "mtp-h200",
        tuple((f"{CONFIG}.num_speculative_tokens={k}",) for k in (1, 4, 8)),
    ),
)


def line(name: str, overrides: tuple[str, ...]) -> str:
    summary = run(load_scenario(LIBRARY / f"speculation-{name}.yaml", overrides)).summary
    block, itl, tpot = summary["speculation"], summary["itl_s"], summary["tpot_s"]
    gained = block["speedup"]
    told = ", ".join(text.removeprefix(f"{CONFIG}.") for text in overrides) or "as bundled"
    return (
        f"  {told:62s} throughput x{gained['output_tokens_per_s']:.2f}  gap x{gained['tpot']:.2f}  "
        f"E2E x{gained['e2e']:.2f}  P95 x{gained['e2e_p95']:.2f}  accepted "
        f"{block['acceptance_rate']:4.0%}  {block['mean_acceptance_length']:.2f} a round  ITL p50 "
        f"{itl['p50'] * 1e3:.1f} p99 {itl['p99'] * 1e3:.0f} ms  TPOT {tpot['mean'] * 1e3:.1f} ms  "
        f"preempted {summary['preemptions']}"
    )


def main() -> None:
    for claim, name, lines in CLAIMS:
        print(f'"{claim}": speculation-{name}.yaml')
        for overrides in lines:
            print(line(name, overrides), flush=True)


if __name__ == "__main__":
    main()
