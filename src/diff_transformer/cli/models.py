"""Commands that use or convert a model: convert, generate, serve."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from diff_transformer.cli.app import Out, app, computing, quiet


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Folder of the model to convert.")],
    out: Out,
    target: Annotated[
        str,
        typer.Option(
            "--to",
            help="Layout: diff-transformer, llama or diffllama; or diff_v2, diff_v3, diff or dex: make the softmax "
            "model a DIFF Transformer with equal logits. Most other decoders of transformers keep their own class.",
        ),
    ] = "diff-transformer",
    lambda_init: Annotated[float, typer.Option(help="With --to diff: initial lambda, between 0 and 1.")] = 0.5,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16 for the matrices; the source's by default."),
    ] = None,
):
    """Convert a model to or from this package's layout, with the same logits.

    docs/conversion.md says what each layout can hold. Reads safetensors only and overwrites nothing.
    """
    from diff_transformer.checks import require_known
    from diff_transformer.model.convert import convert_folder
    from diff_transformer.model.convert.folder import FOLDER_TARGETS, layout_of
    from diff_transformer.model.loading import folder_of

    quiet()
    require_known("target", target, FOLDER_TARGETS)
    source = folder_of(str(source))
    layout, settings = layout_of(source)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 1e9
    print(f"{source}: {layout or settings.get('model_type')}, {size:.2f} GB; to {target}, in {out}")
    for note in convert_folder(source, out, target, dtype=dtype, lambda_init=lambda_init):
        print(note)
    print(f"model: {out}")


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Folder of a model with its tokenizer, or its name on the hub.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; a positive value samples.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; CUDA where there is one by default.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16; the checkpoint's by default, on a CPU float32.")
    ] = None,
):
    """Continue a prompt and stream the text."""
    from diff_transformer.inference.generation import GenerationSettings
    from diff_transformer.inference.generation import generate as continue_prompts
    from diff_transformer.model.loading import load_model
    from diff_transformer.model.presets import PRESETS

    computing()
    settings = GenerationSettings(max_new_tokens, temperature, top_p, seed)
    prompt = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if model in PRESETS and not Path(model).exists():
        print(f"{model} is a preset: an untrained model over bytes, whose text means nothing", file=sys.stderr)
    loaded, tokenizer = load_model(model, device=device, dtype=dtype)
    started = False

    def send(piece: str):
        nonlocal started
        print(piece if started else prompt + piece, end="", flush=True)  # an invalid prompt must raise without output
        started = True

    continue_prompts(loaded, tokenizer, [prompt], settings, on_text=send)
    print("" if started else prompt)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    options: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder of a model with its tokenizer, or its name on the hub.")],
    engine: Annotated[
        str, typer.Option(help="vllm or transformers; auto: vLLM where it is installed, else transformers.")
    ] = "auto",
):
    """Serve OpenAI's API with vLLM or transformers until Ctrl-C; all further options are the engine's own.

    diff-transformer serve FOLDER --port 9000 --tensor-parallel-size 2
    """
    from diff_transformer.serving.serve import serve as run

    quiet()
    run(model, options.args, engine=engine)
