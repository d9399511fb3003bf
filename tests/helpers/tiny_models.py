"""Tiny models with random weights, of every family that experiments run on."""

import json

import torch

FAMILIES = ("diff", "softmax", "llama", "qwen2", "qwen3", "gpt2", "diffllama")


def tiny_model(family, *, positions=128, vocab_size=260, std=None, **fields):
    """Two layers of width 32 with four heads; the same weights on every call.

    Args:
        family: one of ``FAMILIES``, or a variant of this package's attention.
        std: standard deviation of every matrix but lambda's, for attention that is far from uniform; None leaves the
            family's own initialisation.
        fields: of the family's configuration.
    """
    import transformers

    from diff_transformer import DiffTransformerForCausalLM
    from diff_transformer.model.matching import VARIANTS, variant
    from diff_transformer.model.presets import preset

    torch.manual_seed(0)
    if family in VARIANTS:
        config = preset("debug", vocab_size=vocab_size, max_position_embeddings=positions, **fields)
        model = DiffTransformerForCausalLM(variant(config, family))
    elif family == "gpt2":
        sizes = {"vocab_size": vocab_size, "n_positions": positions, "n_embd": 32, "n_layer": 2, "n_head": 4}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **fields}))
    else:
        name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "diffllama": "DiffLlama"}[family]
        sizes = {
            "vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": positions,
        } | ({"head_dim": 8} if family == "qwen3" else {})  # fmt: skip
        config = getattr(transformers, f"{name}Config")(**{**sizes, **fields})
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter_name, parameter in model.named_parameters():
        if std is not None and "lambda" not in parameter_name and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    return model.eval()


def tiny_lm(family, *, batch_size=4, tokenizer=None, **options):
    """``tiny_model`` with a byte tokenizer, as experiments take it."""
    from diff_transformer.data.tokenizer import byte_tokenizer
    from diff_transformer.evals.lm import CausalLM

    return CausalLM(tiny_model(family, **options), tokenizer or byte_tokenizer(), family, batch_size=batch_size)


def bos_tokenizer(template="<|endoftext|> $A"):
    """A byte tokenizer that puts token 256 in front of every text, as Llama's does, or the tokens of ``template``."""
    from tokenizers.processors import TemplateProcessing

    from diff_transformer.data.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    special = [("<|endoftext|>", 256), ("<|pad|>", 257)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


GLM = "<|pad|> <|endoftext|> $A <|pad|>"  # two tokens in front, as [gMASK] <sop>, and one behind


def chat_tokenizer():
    """A byte tokenizer with a chat template: <|endoftext|> begins a turn and <|pad|> ends it."""
    from diff_transformer.data.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|endoftext|>{{ m['role'] }}\n{{ m['content'] | trim }}<|pad|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|endoftext|>assistant\n{% endif %}"
    )
    return tokenizer


def spaced_tokenizer(texts, vocab_size=600):
    """A tokenizer that puts a space before every text and <s> before that, as Llama 2's and Mistral 7B v0.1's do."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), "merged_with_next")  # in training alone
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    )
    state = json.loads(backend.to_str())
    state["pre_tokenizer"] = None
    state["added_tokens"] = state["added_tokens"][:3]
    backend = Tokenizer.from_str(json.dumps(state))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", padding_side="left"
    )


def save_tiny_model(folder, *, positions=512, **fields):
    """A ``debug`` model with a byte tokenizer in ``folder``, for commands."""
    from diff_transformer import DiffTransformerForCausalLM
    from diff_transformer.data.tokenizer import byte_tokenizer
    from diff_transformer.model.presets import preset

    torch.manual_seed(0)
    config = preset("debug", vocab_size=258, max_position_embeddings=positions, pad_token_id=257, **fields)
    DiffTransformerForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_alphabet_model(folder, *, positions=128):
    """A model that has learnt the alphabet, with a byte tokenizer: after "abc" it writes "def", after z comes a."""
    from diff_transformer import DiffTransformerForCausalLM
    from diff_transformer.data.tokenizer import byte_tokenizer
    from diff_transformer.model.presets import preset

    torch.manual_seed(0)
    config = preset(
        "debug", vocab_size=258, num_hidden_layers=1, max_position_embeddings=positions, pad_token_id=257,
        eos_token_id=256, head_norm_init=0.1, initializer_range=0.2,
    )  # fmt: skip
    model = DiffTransformerForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        rows = 97 + (torch.randint(26, (8, 1)) + torch.arange(24)) % 26
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
