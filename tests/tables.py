"""Tables as others publish them, small enough to reckon by hand."""

from pathlib import Path


def small_csvs(folder: Path) -> Path:
    split = folder / "RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1"
    split.mkdir(parents=True)
    dense = ["layer,tokens,time_us"]
    for layer in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
        dense += [f"{layer},{tokens},{100 + tokens}" for tokens in (1, 8, 64, 512)]
    small = ("layernorm", "rotary_emb", "act_fn", "embedding")
    dense += [f"{layer},{tokens},{tokens + 1}" for layer in small for tokens in (1, 512)]
    (split / "dense.csv").write_text("\n".join(dense) + "\n")
    head = [f"lm_head,{n},{1000 + n}" for n in (1, 8, 64)]
    head += [f"sampler,{n},{20 + n}" for n in (1, 64)]
    (split / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *head]) + "\n")
    rows = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
    rows += [f"{new},0,0,0,{10 + new}" for new in (16, 128, 1024)]
    rows += [f"0,0,{n},{kv},{10 + n * kv / 1000}" for n in (1, 8, 64) for kv in (16, 1024)]
    # Beside a prompt of 26 us, decodes of 18 and 76 us take twice as long.
    rows += ["16,0,8,1024,62.384", "16,0,64,1024,177.072"]
    (split / "attention.csv").write_text("\n".join(rows) + "\n")
    return split
