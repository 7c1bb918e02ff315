"""A predicted start on the terminal, in vLLM's own words."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

#: A part of the answer: the words of vLLM's log.
WORDS = {
    "weights_gib": "Model loading took",
    "activation_gib": "torch peak memory increase",
    "graph_gib": "Estimated CUDA graph memory",
    "other_gib": "non-torch memory",
    "kv_gib": "Available KV cache memory",
}


def render_startup(answer: Mapping[str, Any]) -> RenderableType:
    """Every part with its interval, the logged figure beside it where there is one."""
    devices = f"{answer['devices']} x " if answer["devices"] > 1 else ""
    head = Text(
        f"{answer['model']} on {devices}{answer['hardware']}, vLLM {answer['vllm_version']}: ",
        "bold",
    )
    head.append(
        "starts" if answer["starts"] else "does not start",
        "bold green" if answer["starts"] else "bold red",
    )
    log = answer.get("logged")
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    table.add_column("")
    table.add_column("predicted", justify="right")
    table.add_column("90 % interval", justify="right")
    if log is not None:
        table.add_column("logged", justify="right")
        table.add_column("off", justify="right")
    for row in _rows(answer):
        table.add_row(*(row if log is not None else row[:3]))
    lines: list[RenderableType] = [head, table]
    if not answer["starts"]:
        lines.append(Text(_reason(answer), "red"))
        lines += _fixes(answer)
    else:
        lines.append(Text(f"Least sure: {answer['least_sure']}."))
    if log is not None and log["failure"]:
        lines.append(Text(f"The log's start failed: {log['failure']}", "yellow"))
    lines += [Text(f"Note: {note}.", "dim") for note in answer["notes"]]
    return Group(*lines)


def _rows(answer: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    log = answer.get("logged") or {}
    for key, words in WORDS.items():
        low, high = answer["interval"][key]
        theirs = log.get(key)
        if key == "graph_gib":
            words += "" if answer["graph_deducted"] else " (not deducted)"
            theirs = log.get("graph_estimate_gib") or theirs
        yield (
            words,
            f"{answer[key]:.2f} GiB",
            f"{low:.2f} to {high:.2f}",
            "" if theirs is None else f"{theirs:.2f} GiB",
            "" if theirs is None else f"{answer[key] - theirs:+.2f}",
        )
    low, high = answer["interval"]["kv_tokens"]
    theirs = log.get("kv_tokens")
    yield (
        "GPU KV cache size",
        f"{answer['kv_tokens']:,} tokens",
        f"{low:,} to {high:,}",
        "" if theirs is None else f"{theirs:,} tokens",
        "" if not theirs else f"{100 * (answer['kv_tokens'] / theirs - 1):+.1f} %",
    )
    theirs = log.get("kv_blocks")
    yield (
        f"num_gpu_blocks (of {answer['block_size']:,} tokens)",
        f"{answer['kv_blocks']:,}",
        "",
        "" if theirs is None else f"{theirs:,}",
        "" if not theirs else f"{100 * (answer['kv_blocks'] / theirs - 1):+.1f} %",
    )
    yield (
        f"KV of one request of {answer['max_model_len']:,} tokens",
        f"{answer['request_gib']:.2f} GiB",
        *("", "", ""),
    )
    theirs = log.get("max_concurrency")
    length = answer["max_model_len"]
    yield (
        f"Maximum concurrency for {length:,} tokens per request",
        f"{answer['max_concurrency']:.2f}x",
        "",
        "" if theirs is None else f"{theirs:.2f}x",
        "" if not theirs else f"{100 * (answer['max_concurrency'] / theirs - 1):+.1f} %",
    )


def _reason(answer: Mapping[str, Any]) -> str:
    """The words in which vLLM would refuse, and ours."""
    if answer["kv_blocks"] <= 0:
        return f"No available memory for the cache blocks: {answer['reason']}"
    length = answer["estimated_max_model_len"]
    return f"{answer['reason']} (estimated maximum model length {length:,})"


def _fixes(answer: Mapping[str, Any]) -> Iterator[RenderableType]:
    if not answer["fixes"]:
        yield Text("No change of one or two flags would make it start.")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("It would start with")
    table.add_column("KV tokens", justify="right")
    table.add_column("concurrency", justify="right")
    for fix in answer["fixes"]:
        change = " ".join(_change(name, value) for name, value in fix["change"].items())
        change += f" ({fix['needs']})" if fix["needs"] else ""
        table.add_row(change, f"{fix['kv_tokens']:,}", f"{fix['max_concurrency']:.2f}x")
    yield table


def _change(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    return f"no {flag}" if value is None else f"{flag} {_flag(value)}".rstrip()


def _flag(value: Any) -> str:
    return "" if value is True else f"{value:g}" if isinstance(value, float) else str(value)
