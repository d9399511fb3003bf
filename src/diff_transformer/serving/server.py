"""transformers' own server for one model, by default on this machine only."""

import copy
from functools import partial
from typing import Any

from diff_transformer.checks import require_port
from diff_transformer.data.tokenizer import require_fast
from diff_transformer.model.implementations import OWN_NAMES
from diff_transformer.model.loading import label_of, model_path, read_model, read_tokenizer, special_tokens
from diff_transformer.serving.middleware import SiteGuard

SECONDS_TO_FINISH = 5  # for running requests after Ctrl-C
REQUESTS = 16  # in a batch, by default
PAGE_TOKENS = 64  # of the paged cache
BATCH_TOKENS = 512  # per forward pass of continuous batching, including those of new prompts
NO_LIMIT = 1 << 20  # tokens of a request to a model that does not say how many it takes


def make_server(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    continuous_batching: bool = False,
    requests_at_once: int | None = None,
    attn_implementation: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
):
    """Load a model and make its server, behind ``SiteGuard`` and ``RequestChecks``.

    ``server.run()`` answers until Ctrl-C, ``server.close()`` frees the model.

    Args:
        model: folder of a model with its tokenizer, or its name on the hub; any causal language model.
        host: address to listen on. The default is this machine only, because there is no authentication.
        port: 0 for any free port.
        name: the model's name for clients; by default from its path.
        continuous_batching: batch requests over a paged cache; otherwise answer one by one.
        requests_at_once: most requests in a batch, by default 16. The paged cache has room for as many of full length.
        attn_implementation: as ``from_pretrained`` takes it. Continuous batching needs ``"sdpa"`` or ``"eager"``.
        dtype, device: as in transformers: ``"auto"``, or ``"bfloat16"``, ``"cuda:0"``, ...

    Raises:
        RuntimeError: without the packages for serving.
        FileNotFoundError: for a folder that is not there or has no tokenizer.
        ValueError: for a model that cannot be served with these options, as ``read_model``, or a port above 65535.
    """
    require_port(port)
    path = model_path(model)
    _check(continuous_batching, attn_implementation)
    import transformers
    from starlette.exceptions import HTTPException
    from transformers import GenerationConfig
    from transformers.cli.serve import Serve

    from diff_transformer.model.modeling import DiffTransformerForCausalLM
    from diff_transformer.serving.managers import OneByOne, Together
    from diff_transformer.serving.requests import RequestChecks, count_prompt_tokens, give_template

    # The server looks up classes of causal language models here, by the name in config.json.
    setattr(transformers, DiffTransformerForCausalLM.__name__, DiffTransformerForCausalLM)

    class Server(Serve):
        """Constructed as a background server, then run in the foreground."""

        name = ""

        def start_server(self):
            pass

        def run(self):
            """Answer until Ctrl-C."""
            try:
                self.server.run()
            finally:
                self.close()

        def close(self):
            """Stop the threads that generate, and free the model."""
            self._generation_state.shutdown()
            self._model_manager.shutdown()

    if continuous_batching and attn_implementation is None:
        attn_implementation = "sdpa"
    options: dict[str, Any] = {"device": device, "dtype": dtype, "host": host, "port": port, "log_level": "error"}
    theirs = None if attn_implementation in OWN_NAMES else attn_implementation  # transformers knows its own names only
    server = Server(
        non_blocking=True, continuous_batching=continuous_batching, attn_implementation=theirs, **options
    )  # fmt: skip
    server.name = shown = name or label_of(model)
    loaded = _load(server._model_manager, path, shown, attn_implementation)
    give_template(loaded.processor)
    # OpenAI's defaults, whatever the model's own are; temperature 0 is greedy. Without top_k, 50 tokens are drawn from.
    loaded.model.generation_config = GenerationConfig(
        **special_tokens(loaded.model), do_sample=True, temperature=1.0, top_p=1.0, top_k=0
    )
    context = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None) or NO_LIMIT
    if continuous_batching:
        _check_paged(loaded.model.config)
        server._generation_state._cb_manager = Together(batching(context, requests_at_once or REQUESTS))
        server._generation_state._cb_model_id = shown
    else:
        server._generation_state._generate_managers[shown] = OneByOne()
    config = server.server.config
    app: Any = config.app
    for kind in (HTTPException, Exception):
        app.add_exception_handler(kind, _told)
    longest = max(map(len, loaded.processor.get_vocab()))  # characters of a token
    counter = copy.deepcopy(loaded.processor)  # for other threads than the server's own
    count_tokens = partial(count_prompt_tokens, counter, most_characters=context * longest)
    config.app = SiteGuard(RequestChecks(app, shown, count_tokens, context, together=continuous_batching))
    config.timeout_graceful_shutdown = SECONDS_TO_FINISH
    return server


def batching(context: int, requests: int):
    """Continuous batching of this many requests, with a paged cache for all of them at full length."""
    from transformers import ContinuousBatchingConfig

    page = min(PAGE_TOKENS, context)
    pages = requests * -(-context // page)
    return ContinuousBatchingConfig(
        page_size=page, num_blocks=pages, max_batch_tokens=max(BATCH_TOKENS, requests), max_requests_per_batch=requests
    )


def _check_paged(config):
    if getattr(config, "attention", None) == "dint":
        raise ValueError("attention='dint' takes means over whole rows and has no cache; leave out continuous_batching")
    if not getattr(config.get_text_config(), "max_position_embeddings", None):
        raise ValueError(
            f"{type(config).__name__} has no max_position_embeddings, which says how large the paged cache of "
            "continuous batching must be; leave out continuous_batching"
        )
    if getattr(config, "differential", None) is not None:
        raise ValueError(
            "the model was made differential in place, which has no paged cache; leave out continuous_batching"
        )


def _load(manager, path: str, name: str, attn_implementation: str | None):
    """Load the server's only model, called ``name`` in requests and answers, and never unload it."""
    from transformers.cli.serving.model_manager import TimedModel

    read = read_model(
        path, presets=(), attn_implementation=attn_implementation, dtype=manager.dtype, device_map=manager.device,
    )  # fmt: skip
    tokenizer = read_tokenizer(path)
    require_fast(tokenizer)
    loaded = TimedModel(read, timeout_seconds=-1, processor=tokenizer)
    manager.force_model, manager.loaded_models = name, {name: loaded}
    manager.process_model_name = lambda given: given
    return loaded


async def _told(request, error: Exception):
    """An error of the server in the form that OpenAI's clients show."""
    from fastapi.responses import JSONResponse

    status = getattr(error, "status_code", 500)
    message = getattr(error, "detail", f"{type(error).__name__}: {error}")
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse({"error": {"message": str(message), "type": kind}}, status)


def _check(continuous_batching: bool, attn_implementation: str | None):
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise RuntimeError("serving needs more packages; install them: pip install 'diff-transformer[serving]'")
    if continuous_batching and attn_implementation not in (None, "sdpa", "eager"):
        raise ValueError(
            f"continuous batching computes attention through a mask over a paged cache, which attn_implementation="
            f"{attn_implementation!r} does not; accepted: 'sdpa', 'eager'"
        )
