"""Commands that train, and that prepare text for training: compare, train, prepare, study."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from diff_transformer.cli.app import (
    DryRun,
    Engine,
    GPUsPerRun,
    Out,
    Recipe,
    Resume,
    Set,
    app,
    configuration,
    executor,
    quiet,
    resumable,
    step_bars,
    training,
)
from diff_transformer.errors import UserError

CHECKPOINTS = "checkpoints/step-????????"  # complete checkpoints of a run


@app.command()
def compare(
    out: Out,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="Name of a recipe; demo by default, with --from uptrain. `info` lists them."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Folder or hub name of a pretrained Transformer: train it further, made differential and as it is.",
        ),
    ] = None,
    corpus: Annotated[str | None, typer.Option(help="Same as --set data.corpus=...")] = None,
    assignments: Set = None,
    seeds: Annotated[int, typer.Option(help="Pairs to train, one per seed; --resume may add some.")] = 1,
    jobs: Annotated[
        int | None,
        typer.Option(help="Models trained at once; by default one per core, or all if fewer than two per core."),
    ] = None,
    resume: Resume = False,
    variants: Annotated[
        str | None,
        typer.Option(
            help="Also train, by commas: diff_v2, diff_v3, gated, grouped_diff, dint, fixed_lambda, softmax_norm (by "
            "default: the Transformer + head norm, a control that stands beside every claim), each at equal cost. '' "
            "trains the pair alone."
        ),
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option(
            help="With --from, by commas: diff, diff_v2, wider (by default these), diff_v3, dex, attention, lora."
        ),
    ] = None,
    engine: Engine = "local",
    gpus_per_run: GPUsPerRun = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after this many minutes, with everything saved; --resume continues.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="100 steps and few prompts unless --set says otherwise: minutes, no finding."),
    ] = False,
    dry_run: DryRun = False,
    report: Annotated[
        bool, typer.Option(help="Judge the claims and write report.html; `diff-transformer report` can do it later.")
    ] = True,
):
    """Train a DIFF Transformer and its matched Transformer, measure both, and write the report with verdicts.

    With --from both go on from a pretrained Transformer.
    """
    from diff_transformer.lab.compare import compare as run
    from diff_transformer.model.matching import VARIANTS

    training()
    for assignment in assignments or []:
        if assignment.partition("=")[0].strip() == "model.attention":
            more = (
                "--arms" if source else f"--variants ({', '.join(n for n in VARIANTS if n not in ('diff', 'softmax'))})"
            )
            raise UserError(
                f"--set {assignment}: compare trains the pair, diff and softmax, whatever model.attention is; leave it "
                f"out, give other variants with {more}, or train one model with `diff-transformer train`"
            )
    with resumable(out, lambda: any(out.glob(f"members/*/run/{CHECKPOINTS}"))):
        variants = ("" if source else "softmax_norm") if variants is None else variants
        more = listed(variants)
        name = recipe or ("uptrain" if source else "demo")
        changes = [*([] if corpus is None else [f"data.corpus={json.dumps(corpus)}"]), *(assignments or [])]
        config = configuration(name, changes, quick)
        cluster = executor(engine, out, gpus_per_run)
        run(
            config, out, source=source, seeds=seeds, jobs=jobs, resume=resume, variants=more, arms=listed(arms or ""),
            executor=cluster, minutes=minutes, report=report, dry_run=dry_run,
        )  # fmt: skip


def listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


@app.command()
def train(out: Out, recipe: Recipe = "demo", assignments: Set = None, resume: Resume = False, dry_run: DryRun = False):
    """Train one model of a recipe (--set model.attention=softmax for the matched Transformer).

    On eight GPUs: torchrun --nproc-per-node 8 -m diff_transformer train ...
    """
    from diff_transformer.train.ranks import is_first

    training()
    from diff_transformer.train.loop import train as run
    from diff_transformer.train.plan import resolve, world_size
    from diff_transformer.train.run_folder import check_run_folder
    from diff_transformer.train.telemetry import describe
    from diff_transformer.train.training_data import load_training_data

    config = configuration(recipe, assignments)
    if dry_run:
        plan = resolve(config, world_size())
        check_run_folder(out, config, resume=resume)
        load_training_data(plan.config)
        return print(describe(plan)) if is_first() else None
    with resumable(out, lambda: any(out.glob(CHECKPOINTS))), step_bars(disable=not is_first()) as bar:
        task = bar.add_task("training", total=config.train.steps, visible=False)  # until it has begun

        def show(step: int, values: dict):
            described = f"loss {values['loss']:.3f}" if "loss" in values else None
            bar.update(task, completed=step, description=described, visible=True)

        say = partial(bar.console.print, markup=False, highlight=False, soft_wrap=True)  # paths as they are
        trained = run(config, out, resume=resume, progress=show, announce=say)
        bar.update(task, completed=config.train.steps, visible=True)  # a finished run that is resumed takes no step
    if is_first():
        print(f"model: {trained.folder / 'model'}")


@app.command()
def prepare(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help='"python", text, JSON lines, .parquet, also compressed, a folder of them, hub:NAME.'),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the tokens; must be new.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="bpe (default), bytes, a folder or hub name.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Tokens of bpe; 32768 by default.")] = None,
    field: Annotated[str | None, typer.Option(help='Field or column that holds the text; "text" by default.')] = None,
    validation: Annotated[float | None, typer.Option(help="Held-out share of documents; 0.01 by default.")] = None,
    skip_invalid: Annotated[bool, typer.Option("--skip-invalid", help="Skip rows without text.")] = False,
    tasks: Annotated[
        int | None, typer.Option(help="Parts into which the files are divided; one a file by default, at most 64.")
    ] = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    verify: Annotated[Path | None, typer.Option("--verify", help="Only check a prepared folder.")] = None,
):
    """Tokenise text of any size into files that training maps into memory. --resume continues, and repairs."""
    from diff_transformer.cli.prepare import run_prepare, run_verify

    quiet()
    if verify is not None:
        if sources or out is not None:
            raise UserError(f"--verify only checks {verify}; leave out the sources and --out, or --verify")
        run_verify(verify)
        return
    if vocab_size is not None and tokenizer not in (None, "bpe"):
        raise UserError(f"--vocab-size is for bpe, and --tokenizer is {tokenizer!r}; leave out one of them")
    if out is None:
        raise UserError("no folder to write to; give --out FOLDER")
    settings = {
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "field": field,
        "validation": validation,
        "skip_invalid": skip_invalid or None,
        "tasks": tasks,
    }
    with resumable(out, lambda: any(out.glob("shards/*.json"))):
        run_prepare(sources or [], out, settings, resume=resume, dry_run=dry_run)


@app.command()
def study(
    name: Annotated[
        str,
        typer.Argument(
            help="ablation, the Python file of a plan, or in a clone a folder of figures/ that has one, as recall."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the study; finished runs in it are kept.")],
    corpus: Annotated[
        str, typer.Option(help='"python", a file or a folder of text, JSON lines or parquet.')
    ] = "python",
    assignments: Set = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after this many minutes; the same command continues.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Models trained at once; by default one per core, or one on a GPU.")
    ] = None,
    engine: Engine = "local",
    gpus_per_run: GPUsPerRun = None,
    dry_run: DryRun = False,
):
    """Train and measure many small models with several seeds, in parts of any length."""
    from diff_transformer.lab.stages import load_stages
    from diff_transformer.lab.study import run_study

    training()
    with resumable(out, lambda: any(out.rglob(CHECKPOINTS)), "with the same command"):
        stages, cluster = load_stages(name, corpus, assignments or []), executor(engine, out, gpus_per_run)
        done = run_study(stages, out, minutes=minutes, jobs=jobs, executor=cluster, dry_run=dry_run)
    if dry_run:
        return
    print(f"{done.finished} of {done.total} models finished: {out}")
    if done.finished != done.total:
        print("to continue, run the same command again")
