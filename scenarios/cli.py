"""The command line: results on stdout, progress and diagnostics on stderr.

Bad input ends with exit code 2 and one line; Ctrl-C with 130. Heavy libraries are imported by the
command that needs them.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from servecast.costmodels.errors import InputError

if TYPE_CHECKING:
    from servecast.scenarios.run import Progress, Result
    from servecast.scenarios.sweep import Sweep

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A dry run of an LLM server before it is deployed.",
)


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from servecast.scenarios.run import servecast_version

        typer.echo(f"servecast {servecast_version()}")
        raise typer.Exit


@app.command()
def run(
    scenario: Annotated[Path, typer.Argument(help="Scenario file (YAML).")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for summary.json, requests/steps.parquet and report.html."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print summary.json on stdout.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a key, such as engine.block_size."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**63 - 1, help="Seed, instead of the scenario's."),
    ] = None,
    replications: Annotated[
        int, typer.Option(min=1, max=10_000, help="Runs with different seeds; gives intervals.")
    ] = 1,
) -> None:
    """Simulate one deployment and say how it serves its load."""
    from servecast.scenarios.load import load_scenario
    from servecast.scenarios.run import run as run_scenario

    loaded = load_scenario(scenario, set_ or ())
    with _folder(out), _progress() as progress:
        result = run_scenario(loaded, seed=seed, replications=replications, progress=progress)
    for warning in result.facts.warnings:
        typer.echo(f"servecast: warning: {warning}", err=True)
    if out is not None:
        _write(result, out)
    if json:
        _echo(result.summary)
    else:
        from servecast.reports.console import render

        _print(render(result.summary, result.facts))


SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the scenario."),
]

LINE = {"ignore_unknown_options": True}


@app.command(context_settings=LINE)
def kv(
    line: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCENARIO | -- vllm serve MODEL FLAGS...",
            help="A scenario file, or the pasted line; none with --from, or to read the flags "
            "out of --boot-log.",
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="Device of the catalogue (`servecast models`) or a .yaml file."),
    ] = None,
    vllm_version: Annotated[
        str | None, typer.Option(help="Release to predict, such as 0.19.0; 0.32 by default.")
    ] = None,
    boot_log: Annotated[
        Path | None, typer.Option(help="A real start-up log, to stand beside the prediction.")
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", help="Kubernetes manifest, compose file or --config file."),
    ] = None,
    service: Annotated[
        str | None, typer.Option(help="Which container or service of --from.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answer on stdout.")] = False,
    set_: SetOption = None,
) -> None:
    """Will it start, and how many KV blocks will there be?"""
    from servecast.reports.startup_console import render_startup
    from servecast.scenarios.asked import asked_setup
    from servecast.scenarios.startup import start_up

    asked = asked_setup(
        line or [],
        {"hardware": hardware, "vllm_version": vllm_version},
        boot_log=boot_log,
        file=from_,
        service=service,
        overrides=set_ or (),
    )
    answer = start_up(asked.setup, asked.log, asked.notes, shortens=asked.shortens)
    if json or "json" in asked.own:
        _echo(answer)
    else:
        _print(render_startup(answer))


def _init_help() -> str:
    if "init" not in sys.argv:
        return ""
    from servecast.scenarios.flags import understood

    return understood()


@app.command(context_settings=LINE, epilog=_init_help())
def init(
    line: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- vllm serve MODEL FLAGS...", help="The pasted line."),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Device of the catalogue (`servecast models`).")
    ] = None,
    rate: Annotated[float, typer.Option(min=1e-6, help="Requests a second.")] = 1.0,
    input_tokens: Annotated[int, typer.Option(min=1, help="Median prompt length.")] = 1000,
    output_tokens: Annotated[int, typer.Option(min=1, help="Median answer length.")] = 200,
    requests: Annotated[int, typer.Option(min=1, help="Requests to simulate.")] = 1000,
    from_: Annotated[
        Path | None,
        typer.Option("--from", help="Kubernetes manifest, compose file or --config file."),
    ] = None,
    service: Annotated[
        str | None, typer.Option(help="Which container or service of --from.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Scenario file; stdout by default.")
    ] = None,
) -> None:
    """Write a scenario from a `vllm serve` line or a manifest, a device and a rate."""
    from servecast.scenarios.asked import OWN_OF_INIT, asked_line
    from servecast.scenarios.init import scenario_text

    parsed, own = asked_line(line or [], from_, service, OWN_OF_INIT)
    device = hardware or own.get("hardware") or parsed.hardware
    if device is None:
        raise InputError("--hardware: name the device (`servecast models` lists them)")
    text = scenario_text(
        parsed,
        hardware=device,
        rate_per_s=_own_number(own, "rate", rate),
        input_tokens=int(_own_number(own, "input-tokens", input_tokens)),
        output_tokens=int(_own_number(own, "output-tokens", output_tokens)),
        requests=int(_own_number(own, "requests", requests)),
    )
    output = Path(own["output"]) if "output" in own else output
    for flag, why in parsed.unmodelled:
        typer.echo(f"servecast: note: not modelled: {flag}: {why}", err=True)
    for flag in parsed.unknown:
        typer.echo(f"servecast: note: no flag of vLLM that we know: {flag}", err=True)
    if output is None:
        typer.echo(text, nl=False)
        return
    from servecast.reports.files import write_text

    write_text(output, text)


@contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Whoever ends a measurement, a time limit say: what was measured is kept."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@app.command()
def calibrate(
    path: Annotated[
        Path | None,
        typer.Argument(help="Folder of the tables: the systems', or one system's; CSV of points."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Measure this device: cpu or cuda:0. Needs PyTorch.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="With --device: whose shapes, a catalogue name or a config.json."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="With --device: how long to measure.")] = 10.0,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="With --device: float32, bfloat16, float16, fp8, int8, int4."),
    ] = None,
    python: Annotated[
        str, typer.Option(help="With --device: the Python that measures; this one by default.")
    ] = sys.executable,
    kernels: Annotated[
        str, typer.Option(help="With --device: whose kernels, torch, vllm (on a CPU) or auto.")
    ] = "auto",
    engine: Annotated[
        str | None,
        typer.Option(help="With --device: measure the host time of vllm or transformers too."),
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Whose tables: aiconfigurator, llmservingsim or vidur; or points: what single "
            "users got on SRAM devices.",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="Which GPU of theirs, such as h100_sxm or RTX4090.")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="Device of the catalogue whose datasheet is fitted against."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Profile to write, HARDWARE.yaml by default; raw rows go beside it. With --show: "
            "folder for the figures and report.html."
        ),
    ] = None,
    show: Annotated[
        str | None, typer.Option(help="A profile, bundled or a file, instead of a fit.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Another profile of the same device: how far the two are apart, by operator."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answer on stdout.")] = False,
) -> None:
    """Measure a device, or fit tables that others measured, to a profile; or show one."""
    from servecast.calibration.store import load_profile, profile_facts
    from servecast.reports.profile_console import render_profile
    from servecast.scenarios.profiles import (
        Ask,
        check_out,
        draw,
        fit_tables,
        keep,
        load_shown,
        measure_device,
        told_against,
    )

    if from_ == "points" and show is None and device is None:
        from servecast.reports.points_console import render_points
        from servecast.scenarios.points_fit import fit_points

        if against is not None:
            raise InputError(
                "--against: holds profiles of kernels, which --from points has none of"
            )
        check_out(out)
        found = fit_points(path, hardware or system, out)
        if json:
            _echo(found)
        else:
            _print(render_points(found))
        return
    written = None
    if against is not None:
        load_profile(against)
    if show is not None:
        if from_ is not None or path is not None or device is not None:
            raise InputError("--show: takes neither tables nor a device")
        profile, rows = load_shown(show)
        if out is not None:
            _check_folder(out)
            draw(profile, rows, out)
    elif device is not None:
        if from_ is not None or path is not None:
            raise InputError("--device: takes no tables")
        check_out(out)
        ask = Ask(
            device,
            tuple(model or ()),
            minutes,
            tuple(dtype or ()),
            python,
            kernels,
            engine,
            hardware,
        )
        with ended_as_by_ctrl_c(), _progress("seconds") as progress:
            profile, measured = measure_device(ask, progress)
        written = str(keep(profile, out, measured))
    else:
        profile = fit_tables(path, from_, system, hardware)
        written = str(keep(profile, out))
    facts = profile_facts(profile)
    if against is not None:
        facts["against"] = told_against(written or show or "", against)
    if json:
        _echo(facts)
    else:
        _print(render_profile(facts))
    if device is not None and measured[0].facts.get("interrupted"):
        raise typer.Exit(130)


@app.command()
def validate(
    cases: Annotated[
        list[Path],
        typer.Argument(help="YAML files: scenario, and what was measured of it; or scenarios."),
    ],
    profile: Annotated[
        str | None, typer.Option(help="Measured kernels for all cases: a name or a file.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Serve scenarios for real on this machine: vllm or transformers."),
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="With --engine: the Python that has it.")
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(help="With --engine: how long to calibrate first, without --profile."),
    ] = 5.0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.html (and the profile measured).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the rows on stdout.")] = False,
) -> None:
    """Hold predictions against measured runs, metric by metric."""
    from servecast.reports.files import to_json, write_text
    from servecast.reports.validation_console import render_validation
    from servecast.reports.validation_html import validation_page
    from servecast.scenarios.real import Real, validate_real
    from servecast.scenarios.validate import load_case, overlay, predict, summed_up

    if engine is not None:
        with _folder(out), _progress("seconds") as progress:
            real = Real(engine, python or sys.executable, profile, minutes, out)
            answer, overlays = validate_real(cases, real, _tell, progress)
    else:
        loaded = [load_case(case) for case in cases]
        with _folder(out), _progress("cases") as progress:
            found = []
            for at, case in enumerate(loaded):
                found.append(predict(case, profile))
                if progress is not None:
                    progress(at + 1, len(loaded))
        answer = summed_up([row for prediction in found for row in prediction.rows])
        overlays = [overlay(case, one) for case, one in zip(loaded, found, strict=True)]
    if out is not None:
        write_text(out / "report.html", validation_page(answer, overlays))
    if json:
        typer.echo(to_json(answer["rows"]), nl=False)
    else:
        _print(render_validation(answer))


@app.command()
def fit_acceptance(
    file: Annotated[
        Path,
        typer.Argument(
            help="JSON lines with acc_len_<method> (what a round would emit at each position), or "
            "what vLLM's /metrics or log say."
        ),
    ],
    k: Annotated[
        int | None,
        typer.Option(
            "--k", min=1, max=64, help="Tokens of a draft; 5, or all that the metrics have."
        ),
    ] = None,
    holdout: Annotated[
        float, typer.Option(help="Share of the requests that the fit does not see.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Which requests those are.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the answer on stdout.")] = False,
) -> None:
    """Fit how drafts are accepted, and hold the fit against requests it did not see."""
    from servecast.calibration.acceptance import fitted, hold_out, read_lengths
    from servecast.calibration.acceptance_metrics import fitted_to_metrics, rates_of_metrics
    from servecast.reports.acceptance_console import render_acceptance

    shares = rates_of_metrics(file)
    if shares is None:
        lengths, k = read_lengths(file), k or 5
        methods = hold_out(lengths, k, holdout, seed) if holdout else fitted(lengths, k)
    elif holdout:
        raise InputError(f"{file}: --holdout needs requests; metrics count them all together")
    else:
        shares = shares[:k]
        k, methods = len(shares), {"metrics": fitted_to_metrics(shares)}
    if json:
        _echo({"k": k, "methods": methods})
    else:
        _print(render_acceptance(methods))


def _own_number(own: Mapping[str, str], name: str, default: float) -> float:
    """An option that stood after `--`, among vLLM's flags."""
    text = own.get(name.replace("-", "_"))
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1e-6 <= value < 1e12:
        raise InputError(f"--{name} {text}: expected a number above 0")
    return value


OutOption = Annotated[
    Path | None,
    typer.Option(help="Folder for the result, its report, and the points it can go on from."),
]
WorkersOption = Annotated[
    str, typer.Option(help="Processes (N), a local Ray cluster (ray), or ray://host:port.")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with the points of an earlier --out.")
]


@app.command()
def size(
    scenario: Annotated[Path, typer.Argument(help="Scenario file (YAML).")],
    knobs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,C",
            help="A key to vary (max_num_seqs, replicas, hardware, ...); may be repeated. By "
            "default max_num_seqs, max_num_batched_tokens and block_size.",
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="goodput, rate (the load that the SLA allows), or cost.")
    ] = "goodput",
    budget: Annotated[
        int | None, typer.Option(min=1, help="Simulated requests that the search may use.")
    ] = None,
    workers: WorkersOption = "1",
    out: OutOption = None,
    resume: ResumeOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result on stdout.")] = False,
    set_: SetOption = None,
) -> None:
    """Find the engine flags that serve a load best within its SLA."""
    from servecast.reports.sizing_console import render_sizing
    from servecast.reports.sizing_html import render_sizing_report
    from servecast.scenarios.knobs import parse_knobs
    from servecast.scenarios.load import load_scenario
    from servecast.scenarios.sizing import size as find

    loaded = load_scenario(scenario, set_ or ())
    chosen = parse_knobs(knobs) if knobs else None
    with _sweep(out, resume, workers) as sweep:
        result = find(
            loaded, sweep, knobs=chosen, objective=objective, budget_requests=budget, tell=_tell
        )
        if sweep.evaluated < sweep.used_points:
            kept = sweep.used_points - sweep.evaluated
            _tell(f"{kept} of {sweep.used_points} points were there from an earlier run")
    _give(result, out, "sizing.json", render_sizing_report, render_sizing, json)


@app.command()
def whatif(
    scenario: Annotated[Path, typer.Argument(help="Scenario file (YAML).")],
    vary: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=A,B,C",
            help="A key of the scenario, or load, prompt, output, burstiness; ranges as 1..4 or "
            "1..4:0.5; may be repeated, for a grid.",
        ),
    ],
    replications: Annotated[int, typer.Option(min=1, help="Runs a point, on paired seeds.")] = 3,
    workers: WorkersOption = "1",
    out: OutOption = None,
    resume: ResumeOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result on stdout.")] = False,
    set_: SetOption = None,
) -> None:
    """Serve a load under other flags, devices and loads, and say what changes and why."""
    from servecast.reports.whatif_console import render_whatif
    from servecast.reports.whatif_html import render_whatif_report
    from servecast.scenarios.knobs import parse_vary
    from servecast.scenarios.load import load_scenario
    from servecast.scenarios.whatif import whatif as ask

    loaded = load_scenario(scenario, set_ or ())
    varied = [parse_vary(text, "--vary") for text in vary]
    with _sweep(out, resume, workers) as sweep, _progress("runs") as tell:
        result = ask(loaded, varied, replications, sweep, tell or _silent)
    _give(result, out, "whatif.json", render_whatif_report, render_whatif, json)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="Scenario A (YAML).")],
    b: Annotated[Path, typer.Argument(help="Scenario B (YAML).")],
    replications: Annotated[int, typer.Option(min=1, help="Paired runs of each.")] = 5,
    canary: Annotated[
        float | None, typer.Option(help="Share of the requests that B gets, such as 0.05.")
    ] = None,
    workers: WorkersOption = "1",
    out: OutOption = None,
    resume: ResumeOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result on stdout.")] = False,
) -> None:
    """Serve the same load with two deployments, and say which is better and how surely."""
    from servecast.reports.whatif_console import render_compare
    from servecast.reports.whatif_html import render_compare_report
    from servecast.scenarios.compare import compare as hold
    from servecast.scenarios.load import load_scenario

    first, second = load_scenario(a), load_scenario(b)
    with _sweep(out, resume, workers) as sweep, _progress("runs") as tell:
        result = hold(first, second, replications, sweep, canary, tell or _silent)
    _give(result, out, "compare.json", render_compare_report, render_compare, json)


@app.command()
def schedule(
    workload: Annotated[Path, typer.Argument(help="Workload (.json) or many (.jsonl, .jsonl.gz).")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Trace file; stdout by default.")
    ] = None,
) -> None:
    """Schedule workloads with step-numbered arrivals, for comparison with vLLM's own schedules."""
    from servecast.scenarios.schedule import schedule_file

    if output is None:
        schedule_file(workload, sys.stdout)
        return
    from servecast.reports.files import atomic_write

    with atomic_write(output) as aside, aside.open("w", encoding="utf-8") as file:
        schedule_file(workload, file)


@app.command()
def parity(
    n: Annotated[int, typer.Option("--n", min=1, help="Random workloads to compare live.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first.")] = 0,
    large: Annotated[bool, typer.Option("--large", help="60 to 250 requests each.")] = False,
    vllm: Annotated[
        str | None, typer.Option(metavar="PYTHON", help="A Python that has vLLM: compare live.")
    ] = None,
    recorded: Annotated[
        list[Path] | None,
        typer.Option(help="Recorded schedules, or a folder of them, without --vllm."),
    ] = None,
) -> None:
    """Compare our schedules with vLLM's, step by step, feature by feature."""
    from servecast.scenarios import parity as comparison

    if vllm is None:
        cases = comparison.recorded(recorded or [Path("tests/golden")])
        matrix = comparison.Matrix("recorded")
        with _progress() as tell:
            comparison.compare(cases, matrix, _count(tell, 0))
    else:
        with comparison.LiveVllm(vllm) as live, _progress() as tell:
            matrix = comparison.Matrix(live.version)
            cases = live.cases(range(seed, seed + n), large)
            comparison.compare(cases, matrix, _count(tell, n))
            if matrix.first is not None:
                matrix.first = live.shrink(matrix.first)
    _print(comparison.render(matrix))
    if matrix.first is not None:
        raise typer.Exit(1)


@app.command()
def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The scenario reference instead.")
    ] = False,
) -> None:
    """Print the JSON schema of a scenario, for editors."""
    from servecast.scenarios.load import to_json_schema
    from servecast.scenarios.reference import to_markdown

    found = to_json_schema()
    if markdown:
        typer.echo(to_markdown(found), nl=False)
    else:
        _echo(found)


@app.command()
def models() -> None:
    """List the models, devices, profiles and fits of acceptance of the catalogue."""
    from servecast.calibration.fits import bundled_fits
    from servecast.calibration.steps import step_profile_names
    from servecast.calibration.store import profile_names
    from servecast.costmodels.catalogue import hardware_names, model_names

    typer.echo("models:")
    for name in model_names():
        typer.echo(f"  {name}")
    typer.echo("hardware:")
    for name in hardware_names():
        typer.echo(f"  {name}")
    typer.echo("profiles (kernels measured on a device):")
    for name in profile_names():
        typer.echo(f"  {name}")
    typer.echo("profiles (constants of whole steps):")
    for name in step_profile_names():
        typer.echo(f"  {name}")
    typer.echo("profiles (constants of SRAM devices):")
    typer.echo("  cerebras")
    typer.echo("acceptance of drafts (speculative_config.acceptance.fit):")
    for name, fit in bundled_fits().items():
        typer.echo(f"  {name}: {fit.source}")


def _count(progress: "Progress | None", total: int) -> "Callable[[int], None]":
    return (lambda done: None) if progress is None else (lambda done: progress(done, total))


@contextmanager
def _sweep(out: Path | None, resume: bool, workers: str) -> "Iterator[Sweep]":
    """A sweep whose points are kept under `--out`."""
    from servecast.scenarios.store import Store
    from servecast.scenarios.sweep import Sweep

    folder = None
    if resume and (out is None or not (out / "points").is_dir()):
        raise InputError(f"--resume: no points to go on with in {out or '--out'}")
    if out is not None:
        _check_folder(out)
        folder = out / "points"
    with Sweep(Store(folder), workers) as sweep:
        yield sweep


def _silent(done: int, total: int) -> None:
    """No terminal, no bar."""


def _tell(line: str) -> None:
    if sys.stderr.isatty():
        typer.echo(f"servecast: {line}", err=True)


def _give(
    result: dict[str, Any],
    out: Path | None,
    name: str,
    page: Callable[[dict[str, Any]], str],
    console: Callable[[dict[str, Any]], Any],
    json: bool,
) -> None:
    """An answer: its file and page under `--out`, then JSON or what a terminal shows."""
    if out is not None:
        from servecast.reports.files import write_json, write_text

        write_json(out / name, result)
        write_text(out / "report.html", page(result))
    if json:
        _echo(result)
    else:
        _print(console(result))


def _print(renderable: Any) -> None:
    from rich.console import Console

    Console().print(renderable)


@contextmanager
def _folder(out: Path | None) -> Iterator[None]:
    """Make the folder before the simulation rather than fail after it; leave no empty one."""
    if out is None:
        yield
        return
    there = out.exists()
    _check_folder(out)
    try:
        yield
    except BaseException:
        if not there:
            with suppress(OSError):
                out.rmdir()
        raise


def _check_folder(out: Path) -> None:
    if str(out) in ("", "."):
        raise InputError("--out: name a folder of its own")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}") from None
    for name in ("summary.json", "report.html", "requests.parquet", "steps.parquet"):
        if (out / name).is_dir():
            raise InputError(f"--out {out}: {name} in it is a folder")


def _write(result: "Result", out: Path) -> None:
    from servecast.reports.files import write_json, write_text
    from servecast.reports.html import render_report
    from servecast.reports.tables import write_requests, write_steps

    write_json(out / "summary.json", result.summary)
    write_requests(result.trace, out / "requests.parquet")
    write_steps(result.trace, out / "steps.parquet")
    write_text(out / "report.html", render_report(result.summary, result.facts, result.trace))


def _echo(value: dict[str, Any]) -> None:
    from servecast.reports.files import to_json

    typer.echo(to_json(value), nl=False)


@contextmanager
def _progress(what: str = "requests") -> "Iterator[Progress | None]":
    """A bar on stderr that only a run of some seconds ever shows."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    bar = Progress(
        what,
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(what, total=None)
    with bar:
        yield lambda done, total: bar.update(task, completed=done, total=total)


def main() -> None:
    """Entry point."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code or 0)
    except InputError as error:
        _fail(str(error))
    except BrokenPipeError:
        # The reader of our output has gone, as `| head` does; what is left has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except OSError as error:
        _fail(f"{error.filename or 'output'}: {error.strerror}")
    except Exception as error:
        # A command line that does not parse; its class lives in click or in typer, by version.
        told = getattr(error, "format_message", None)
        if told is None:
            raise
        _fail(told())


def _fail(message: str) -> None:
    """The one line of bad input."""
    typer.echo(f"servecast: error: {' '.join(message.split())}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
