"""Commands that use or convert a model: convert, generate, export, serve."""

from pathlib import Path
from typing import Annotated, Any

import typer

from diff_transformer.checks import LAST_PORT
from diff_transformer.cli.app import Out, app, bytes_done, computing, quiet


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Folder of the model to convert.")],
    out: Out,
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="llama, diffllama, motif, diff-transformer; detected from the folder by default.",
        ),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            "--to",
            help="diff-transformer, llama, diffllama or motif; diff or diff_v2 make a DIFF "
            "Transformer of a softmax model with equal logits, of most decoders of transformers in their own class.",
        ),
    ] = "diff-transformer",
    lambda_init: Annotated[
        float | None, typer.Option(help="With --to diff: initial lambda, between 0 and 1; 0.5 by default.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, float16 or float64 for the matrices; the source's by default."),
    ] = None,
):
    """Convert a model to or from this package's layout, with the same logits.

    docs/conversion.md says what each layout can hold. Reads safetensors only and overwrites nothing.
    """
    from diff_transformer.model.convert import convert_folder

    quiet()
    options: dict[str, Any] = {} if lambda_init is None else {"lambda_init": lambda_init}
    with bytes_done("converting") as progress:
        notes = convert_folder(
            source, out, origin, target, dtype=dtype, progress=progress, **options,
        )  # fmt: skip
    for note in notes:
        print(note)
    print(f"model: {out}")


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Folder of a model with its tokenizer, or its name on the hub.")],
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - reads it from standard input.")] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="File with one prompt per line; prints JSON.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts of the file per batch.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; a positive value samples.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; CUDA where there is one by default.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16; the checkpoint's by default.")] = None,
    weights: Annotated[str | None, typer.Option(help="int8: keep matrices in 8 bits (torchao).")] = None,
    assistant: Annotated[str | None, typer.Option(help="Smaller model for speculative decoding; same text.")] = None,
    lookup: Annotated[int | None, typer.Option(help="Tokens to guess ahead from the prompt itself.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the step, over a static cache.")] = False,
    prefill_chunk: Annotated[int | None, typer.Option(help="Tokens of the prompt per forward pass.")] = None,
):
    """Continue a prompt and stream the text, or continue each line of a file."""
    from diff_transformer.cli.generate import run_generate
    from diff_transformer.inference.generation import GenerationSettings

    computing()
    settings = GenerationSettings(max_new_tokens, temperature, top_p, seed, prefill_chunk, compiled, lookup)
    run_generate(
        model, prompt, settings, prompts_file=prompts, batch_size=batch_size, device=device, dtype=dtype,
        weights=weights, assistant=assistant,
    )  # fmt: skip


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Folder of a model with its tokenizer, hub name or preset.")],
    out: Out,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16; the checkpoint's by default.")] = None,
    for_engines: Annotated[
        bool, typer.Option("--for-engines", help="For engines that run models of transformers, such as vLLM.")
    ] = False,
):
    """Write a checkpoint with its code, for trust_remote_code where this package is not installed."""
    from diff_transformer.durable import require_writable
    from diff_transformer.inference.export import export as run

    quiet()
    require_writable(out)
    run(model, out, dtype=dtype, for_engines=for_engines)
    print(f"model: {out}")


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Folder of a model with its tokenizer, or its name on the hub.")],
    vllm_options: Annotated[
        list[str] | None, typer.Argument(help="vLLM's own options, after --: -- --tensor-parallel-size 2")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; by default, this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=LAST_PORT, help="Port; 0 for any free port.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="The model's name for clients; by default, its folder's name.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="vllm or transformers; auto: vLLM where it is installed and takes the model.")
    ] = "auto",
    continuous_batching: Annotated[
        bool, typer.Option("--continuous-batching", help="Batch requests over a paged cache; vLLM always does.")
    ] = False,
    requests_at_once: Annotated[
        int | None, typer.Option(min=1, help="Most requests in a batch; 16, or vLLM's own, by default.")
    ] = None,
    attn_implementation: Annotated[
        str | None, typer.Option(help="As in from_pretrained: sdpa, diff_auto, ...; not with vLLM.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:0, ...; only auto with vLLM.")] = "auto",
):
    """Answer OpenAI's clients (chat completions, completions, responses) until Ctrl-C."""
    from diff_transformer.serving.engines import serve as run

    quiet()
    run(
        model, vllm_options or (), engine=engine, host=host, port=port, name=name, dtype=dtype, device=device,
        continuous_batching=continuous_batching, requests_at_once=requests_at_once,
        attn_implementation=attn_implementation,
    )  # fmt: skip
