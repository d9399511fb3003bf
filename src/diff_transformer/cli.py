"""The command line: each command is a thin wrapper of one importable function."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Differential attention (arXiv 2410.05258): train the matched pair, run the experiments, write a report.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Out = Annotated[Path, typer.Option("--out", help="Folder for everything that is written; must be new.")]
Recipe = Annotated[str, typer.Option("--recipe", help="Name of a recipe: see `diff-transformer info`.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override a setting, e.g. --set optim.lr=1e-3.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run in the same folder.")]


@app.command()
def compare(
    out: Out,
    recipe: Recipe = "demo",
    assignments: Set = None,
    seeds: Annotated[int, typer.Option(help="Pairs to train, each with a seed of its own.")] = 1,
    jobs: Annotated[int | None, typer.Option(help="Models trained at a time; on CPU, one a core by default.")] = None,
    resume: Resume = False,
    variants: Annotated[
        str, typer.Option(help="Also train, by commas: diff_v2, grouped_diff, dint, fixed_lambda, each at equal cost.")
    ] = "",
):
    """Train a DIFF Transformer and its matched Transformer, measure both, write the report with the verdicts."""
    from diff_transformer.compare import compare as run

    _quiet()
    with _resumable():
        more = [name.strip() for name in variants.split(",") if name.strip()]
        run(_configuration(recipe, assignments), out, seeds=seeds, jobs=jobs, resume=resume, variants=more)


@app.command()
def train(out: Out, recipe: Recipe = "demo", assignments: Set = None, resume: Resume = False):
    """Train one model of a recipe (--set model.attention=softmax for the matched Transformer).

    --set train.parallel.devices=8 starts eight processes; torchrun -m diff_transformer train ... starts any number.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from diff_transformer.train.launch import is_first, start_processes

    config = _configuration(recipe, assignments)
    start_processes(config.train.parallel)
    from diff_transformer.train.loop import train as run

    _quiet()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    left = TextColumn("left")
    with _resumable(), Progress(*columns, left, TimeRemainingColumn(), disable=not is_first()) as bar:
        task = bar.add_task("training", total=config.train.steps)

        def show(step: int, values: dict):
            described = f"loss {values['loss']:.3f}" if "loss" in values else None
            bar.update(task, completed=step, description=described)

        trained = run(config, out, resume=resume, progress=show, announce=bar.console.print)
    if is_first():
        print(f"model: {trained.folder / 'model'}")


@app.command(name="eval")
def evaluate(
    name: Annotated[str, typer.Argument(help="An experiment, or all: see the list above.")],
    out: Annotated[Path, typer.Option("--out", help="JSON file for one result, or a folder; must be new.")],
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help="Folder with its tokenizer, hub name or preset; may be repeated."),
    ] = None,
    assignments: Set = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: a minute an experiment on a small model.")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="At most so many samples of each part of an experiment.")] = None,
    corpus: Annotated[
        str | None,
        typer.Option(help='Text: "python", a file, a folder, an archive. What a folder of it trains is kept out.'),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Labelled data: a file, hub:NAME, or the offline default.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens in a prompt or row.")] = None,
    samples: Annotated[int | None, typer.Option(help="Prompts in a cell, questions, or rows of text.")] = None,
    seed: Annotated[int | None, typer.Option(help="What is drawn at random is drawn from it.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; CUDA where there is one by default.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16; the checkpoint's by default.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts or rows in one forward pass.")] = 32,
    resume: Resume = False,
):
    """Run an experiment, or all of them, on any causal language model."""
    from diff_transformer.evals.suite import Plan, names_of

    _quiet()
    options = {"corpus": corpus, "data": data, "length": length, "samples": samples, "seed": seed}
    plan = Plan(
        names_of(name, quick), models or [], options, assignments or [], quick, limit, device, dtype, batch_size
    )
    single = out.suffix == ".json" and len(plan.names) == 1 and len(plan.models) <= 1
    with _resumable(), _bars() as bar:
        failed = _evaluate_one(plan, out, resume, bar) if single else _evaluate_many(plan, out, resume, bar)
    if failed:
        raise typer.Exit(2)


def _evaluate_one(plan, out: Path, resume: bool, bar) -> bool:
    from diff_transformer.evals.command import experiment, load_lm, run_eval, settings_of

    (name,) = plan.names
    settings = settings_of(name, plan.options, plan.assignments, quick=plan.quick)
    lm = None
    if getattr(experiment(name), "NEEDS_MODEL", True):
        if not plan.models:
            raise ValueError("no model; give --model with a folder, a name on the hub or a preset")
        lm = load_lm(plan.models[0], device=plan.device, dtype=plan.dtype, batch_size=plan.batch_size)
    result = run_eval(name, lm, settings, out, limit=plan.limit, resume=resume, bar=bar(name))
    if hasattr(experiment(name), "table"):
        from rich.console import Console

        Console().print(experiment(name).table(result))
    else:
        for metric, value in result.metrics.items():
            print(f"{metric:32} {value:.4f}")
    print(f"result: {out}")
    return False


def _evaluate_many(plan, out: Path, resume: bool, bar) -> bool:
    from diff_transformer.evals.suite import run_suite

    outcomes = run_suite(plan, out, resume=resume, bar=bar)
    for outcome in outcomes:
        told = outcome.error or outcome.path
        print(f"{outcome.name:20} {outcome.model or '':16} {told}", file=sys.stderr if outcome.error else sys.stdout)
    if any(outcome.result for outcome in outcomes):
        print(f"report: {out / 'report.html'}")
    return any(outcome.error for outcome in outcomes)


@contextmanager
def _bars() -> Generator:
    """Progress bars, one for each part of an experiment: ``bar(title)(part, done, total)``."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), transient=True) as progress:

        def bar(title: str):
            tasks: dict[str, Any] = {}

            def show(part: str, done: int, total: int):
                if part not in tasks:
                    for task in list(progress.task_ids):
                        progress.update(task, visible=False)
                    tasks[part] = progress.add_task(f"{title}: {part}", total=total)
                progress.update(tasks[part], completed=done, total=total)

            return show

        yield bar


@app.command()
def prepare(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help='"python", text, .jsonl[.gz|.zst], .parquet, a folder or tar of them, hub:NAME; any number.'
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the shards; must be new.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="bpe (default), bytes, cl100k, a .tiktoken file, a folder or hub name.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Tokens of bpe; 32768 by default.")] = None,
    field: Annotated[str | None, typer.Option(help='Field or column that holds the text; "text" by default.')] = None,
    validation: Annotated[float | None, typer.Option(help="Share of documents held out; 0.01 by default.")] = None,
    shard_mb: Annotated[float | None, typer.Option(help="MB of text in a shard; 32 by default.")] = None,
    skip_invalid: Annotated[bool, typer.Option("--skip-invalid", help="Leave out rows without text.")] = False,
    jobs: Annotated[int | None, typer.Option(help="Processes; one a core by default.")] = None,
    resume: Resume = False,
    verify: Annotated[Path | None, typer.Option("--verify", help="Check a prepared folder, and do no more.")] = None,
):
    """Tokenise text of any size to shards that training maps into memory; --resume goes on, and mends."""
    from diff_transformer.data.prepare.command import run_prepare, run_verify

    _quiet()
    if verify is not None:
        run_verify(verify)
        return
    if out is None:
        raise ValueError("no folder to write to; give --out FOLDER")
    settings = {
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "field": field,
        "validation": validation,
        "shard_bytes": None if shard_mb is None else round(shard_mb * 1e6),
        "skip_invalid": skip_invalid or None,
    }
    with _resumable():
        run_prepare(sources or [], out, settings, jobs=jobs, resume=resume)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="attention, decode, throughput or step.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON file for the record; must be new. Default: in runs/bench.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="The whole grid of lengths and widths.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    grid: Annotated[
        str | None, typer.Option(help="Shapes for attention, batch x heads x length x width: 1x4x2048x64,...")
    ] = None,
):
    """Time the operator and the models against softmax attention of the matched size; correctness is checked first."""
    from diff_transformer.bench.command import run_bench

    _quiet()
    run_bench(name, out, full, device, grid)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Folder of the model to convert.")],
    out: Out,
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="llama, diffllama, authors, authors-v2, motif, diff-transformer; told from the folder if left out.",
        ),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            "--to",
            help="diff-transformer, llama, diffllama, authors, authors-v2 or motif; diff or diff_v2 make a DIFF "
            "Transformer of a softmax model, with its logits.",
        ),
    ] = "diff-transformer",
    lambda_init: Annotated[
        float | None, typer.Option(help="With --to diff: lambda at the start, between 0 and 1; 0.5 by default.")
    ] = None,
    naive_grouped_query: Annotated[
        bool,
        typer.Option(
            "--naive-grouped-query",
            help="The authors' layout is that of their plain file, which groups keys otherwise than the flash files.",
        ),
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16 for the matrices; the source's by default.")
    ] = None,
):
    """Convert a model to this package's layout, from it or through it; where the layouts agree, so do the logits.

    docs/conversion.md says what each layout can hold. Only safetensors are read; nothing is written over.
    """
    from diff_transformer.model.convert import convert_folder

    _quiet()
    options: dict[str, Any] = {} if lambda_init is None else {"lambda_init": lambda_init}
    with _bytes("converting") as progress:
        notes = convert_folder(
            source, out, origin, target, naive_grouped_query=naive_grouped_query, dtype=dtype, progress=progress,
            **options,
        )  # fmt: skip
    for note in notes:
        print(note)
    print(f"model: {out}")


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Folder of a model with its tokenizer, or its name on the hub.")],
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - reads it from standard input.")] = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="File with a prompt a line; prints JSON.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts of the file that are continued at a time.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above it, tokens are drawn.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this probability together.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the draw.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; CUDA where there is one by default.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16; the checkpoint's by default.")] = None,
    weights: Annotated[str | None, typer.Option(help="int8: matrices held in 8 bits (torchao).")] = None,
    assistant: Annotated[str | None, typer.Option(help="Smaller model that guesses ahead; same text.")] = None,
    lookup: Annotated[int | None, typer.Option(help="Guess so many tokens ahead from the prompt itself.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the step, over a static cache.")] = False,
    prefill_chunk: Annotated[int | None, typer.Option(help="Tokens of the prompt in one forward pass.")] = None,
):
    """Continue a prompt, and print the text as it comes; or continue each line of a file."""
    from diff_transformer.inference.command import run_generate
    from diff_transformer.inference.generation import Settings

    _quiet()
    settings = Settings(max_new_tokens, temperature, top_p, seed, prefill_chunk, compiled, lookup)
    run_generate(
        model, prompt, settings, prompts_file=prompts, batch_size=batch_size, device=device, dtype=dtype,
        weights=weights, assistant=assistant,
    )  # fmt: skip


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Folder of a model with its tokenizer, hub name or preset.")],
    out: Out,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16; the checkpoint's by default.")] = None,
):
    """Write a checkpoint with its code, which trust_remote_code loads where this package is not installed."""
    from diff_transformer.inference.export import export as run

    _quiet()
    run(model, out, dtype=dtype)
    print(f"model: {out}")


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Folder of a model with its tokenizer, or its name on the hub.")],
    host: Annotated[str, typer.Option(help="Address to listen at; by default this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 for any that is free.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; its folder's name by default.")] = None,
    continuous_batching: Annotated[
        bool, typer.Option("--continuous-batching", help="Answer requests together, over a paged cache.")
    ] = False,
    requests_at_once: Annotated[int, typer.Option(help="How many are answered together at most.")] = 16,
    attn_implementation: Annotated[str | None, typer.Option(help="As from_pretrained takes it: sdpa, ...")] = None,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:0, ...")] = "auto",
):
    """Answer OpenAI's clients (chat completions, completions, responses) until Ctrl-C."""
    from diff_transformer.serving.server import make_server

    _quiet()
    server = make_server(
        model, host=host, port=port, name=name, continuous_batching=continuous_batching,
        requests_at_once=requests_at_once, attn_implementation=attn_implementation, dtype=dtype, device=device,
    )  # fmt: skip
    if host not in ("127.0.0.1", "localhost", "::1"):
        print(f"{host}: whoever reaches this address may use the model; there is no authentication", file=sys.stderr)
    print(f"model: {server.name}; stop with Ctrl-C", flush=True)
    server.run()


@app.command()
def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            help="results.json of a comparison or its folder; results of `eval`, any number; or folders of `train`, "
            "any number, finished or not."
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", help="HTML file to write; needed unless --serve.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Open a comparison's folder at 127.0.0.1, and draw texts typed there.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of --serve; any that is free if 0.")] = 0,
):
    """Write the report of a comparison again and print its claims; or one page of experiments, or of runs overlaid."""
    from rich.console import Console

    from diff_transformer.report import (
        is_comparison,
        is_run,
        load_results,
        render_claims,
        write_evals_report,
        write_report,
        write_runs_report,
    )

    if serve:
        from diff_transformer.report.serve import serve_report

        _quiet()
        if out is not None or len(results) != 1 or not results[0].is_dir() or not is_comparison(results[0]):
            raise ValueError("--serve takes the folder of one comparison and writes no file; leave out --out")
        return serve_report(results[0], port=port)
    if out is None:
        raise ValueError("there is no --out; name the HTML file to write, or give --serve")
    if all(is_run(path) for path in results):
        print(f"report: {write_runs_report([*results], out, overwrite=overwrite)}")
    elif len(results) == 1 and is_comparison(results[0]):
        loaded = load_results(results[0])
        Console().print(render_claims(loaded))
        print(f"report: {write_report(loaded, out, overwrite=overwrite)}")
    else:
        print(f"report: {write_evals_report(list(results), out, overwrite=overwrite)}")


@app.command()
def study(
    name: Annotated[str, typer.Argument(help="desk or stability.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the study; what is finished there is not done again.")],
    corpus: Annotated[str, typer.Option(help='Text: "python", a file, a folder, an archive.')] = "python",
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so many minutes; the next call goes on from there.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Models trained at a time; one a core by default.")] = None,
):
    """Train and measure many small models with several seeds, in pieces as long as you like."""
    from diff_transformer.recipes.studies import study as plan
    from diff_transformer.study import run_study

    _quiet()
    with _resumable():
        done = run_study(plan(name, corpus), out, minutes=minutes, jobs=jobs)
    total = "a number that the sweep decides" if done.total is None else done.total
    print(f"{done.finished} of {total} models finished: {out}")
    if done.finished != done.total:
        print("the same command again goes on")


@app.command()
def info(
    preset: Annotated[str | None, typer.Argument(help="Name of a model preset; all of them if left out.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens a sequence, for FLOPs and cache.")] = None,
    attention: Annotated[
        str, typer.Option(help="Variant against its matched Transformer: diff_v2, grouped_diff, dint, fixed_lambda.")
    ] = "diff",
):
    """Both sides of a preset: parameters by part, FLOPs a token, key/value cache."""
    from rich.console import Console

    from diff_transformer.model.info import pair_table, preset_table

    Console().print(pair_table(preset, length, attention) if preset else preset_table())


@contextmanager
def _resumable() -> Generator[None]:
    """After Ctrl-C say how to go on, and exit with 130; after SIGTERM, the same with 0."""
    from diff_transformer.train.launch import is_first
    from diff_transformer.train.signals import sigterm_interrupts

    said = "stopped, state saved; continue with --resume"
    try:
        with sigterm_interrupts(said):
            yield
    except KeyboardInterrupt as stopped:
        if is_first():
            print(str(stopped) or said, file=sys.stderr)
        raise typer.Exit(getattr(stopped, "exit_code", 130)) from None


@contextmanager
def _bytes(title: str) -> Generator:
    """A progress bar in bytes: ``progress(done, total)``."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TextColumn("left"))
    screen = Console(stderr=True)
    quiet = not screen.is_terminal
    with Progress(*columns, TimeRemainingColumn(), transient=True, console=screen, disable=quiet) as bars:
        task = bars.add_task(title, total=None)

        def show(done: int, total: int):
            bars.update(task, completed=done, total=total)

        yield show


def _quiet():
    """Leave the screen to our own progress bars and messages."""
    import logging

    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # transformers imports torchao where it is installed, which warns of every kernel that is for another machine.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _configuration(name: str, assignments: list[str] | None):
    from diff_transformer.recipes import recipe
    from diff_transformer.train.config import override

    return override(recipe(name), assignments or [])


def main():
    """Run the command line; an error that a user can mend is a message, not a traceback."""
    try:
        app()
    except (ValueError, TypeError, OSError, FloatingPointError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
