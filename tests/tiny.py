"""Tiny models of real architectures, saved as real model directories.

    llama, llama-bf16, llama-fp16   2 layers of full attention, random weights
    llama-4bit                      the same architecture, quantised
    gemma3                          sliding and full layers by turns, window 32, random weights
    qwen3_5, qwen3_next             3 Gated DeltaNet layers and 1 of attention, random weights
    tape                            llama that reads off a tape: each word has one successor

All have the same tokenizer: bytes, a few whole words, three control tokens, ChatML. The template
ends with the variable ``opening``, which is how a test chooses the tape's first word.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text, llama, qwen3_5, qwen3_next
from mlx_lm.utils import quantize_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = "<|im_end|>"
CONTROL = ("<|endoftext|>", "<|im_start|>", EOS)
WINDOW = 32
CONTEXT = 2048
SEED = 11

TAPE = ("\n", "alpha", " beta", " gamma", " delta", EOS)
"""What the tape model answers to any chat: the template ends with a line break."""

LOOP = (" one", " two", " three")
"""With one of these as ``opening`` it goes round for ever."""

WORDS = (*TAPE[1:-1], *LOOP)

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening }}{% endif %}"
)


def llama_config() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def _gemma3() -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "max_position_embeddings": CONTEXT,
    }


def _hybrid() -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
    }


def _qwen3_5() -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return {**_hybrid(), "model_type": "qwen3_5", "rope_parameters": rope}


def _qwen3_next() -> dict[str, Any]:
    return {
        **_hybrid(),
        "model_type": "qwen3_next",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": True,
    }


NAMES = (
    "llama",
    "llama-bf16",
    "llama-fp16",
    "llama-4bit",
    "gemma3",
    "qwen3_5",
    "qwen3_next",
    "tape",
)
_ARCHITECTURES: dict[str, Any] = {
    "llama": llama,
    "gemma3_text": gemma3_text,
    "qwen3_5": qwen3_5,
    "qwen3_next": qwen3_next,
}


def build(name: str, folder: Path) -> Path:
    """Write the model called ``name`` below ``folder``; the same bytes each time."""
    path = folder / name
    path.mkdir(parents=True)
    tokenizer = make_tokenizer()
    match name:
        case "gemma3":
            config = _gemma3()
        case "qwen3_5":
            config = _qwen3_5()
        case "qwen3_next":
            config = _qwen3_next()
        case _:
            config = llama_config()
    config["vocab_size"] = tokenizer.get_vocab_size()
    config["eos_token_id"] = tokenizer.token_to_id(EOS)
    model = make(config)
    match name:
        case "llama-bf16":
            model.set_dtype(mx.bfloat16)
        case "llama-fp16":
            model.set_dtype(mx.float16)
        case "llama-4bit":
            model, config = quantize_model(model, config, group_size=32, bits=4)
        case "tape":
            loops = zip(LOOP, (*LOOP[1:], LOOP[0]), strict=True)
            read_off(model, tokenizer, [*pairwise(TAPE), *loops])
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    save_tokenizer(tokenizer, path)
    return path


def make(config: dict[str, Any]) -> nn.Module:
    architecture = _ARCHITECTURES[config["model_type"]]
    model: nn.Module = architecture.Model(architecture.ModelArgs.from_dict(config))
    random = np.random.default_rng(SEED)

    def draw(path: str, array: mx.array) -> mx.array:
        if path.endswith("A_log"):  # slow decay, so that states remember hundreds of tokens
            return mx.array(random.uniform(-6.0, -2.0, array.shape).astype(np.float32))
        if array.ndim == 1:  # a norm
            return mx.array(random.normal(1.0, 0.1, array.shape).astype(np.float32))
        scale = 1.0 if "embed" in path else array.shape[-1] ** -0.5
        return mx.array(random.normal(0.0, scale, array.shape).astype(np.float32))

    parameters: Any = tree_flatten(model.parameters())
    flat = [(path, draw(path, array)) for path, array in parameters]
    model.load_weights(flat)
    mx.eval(model.parameters())
    return model


def read_off(model: Any, tokenizer: Tokenizer, follows: Iterable[tuple[str, str]]) -> None:
    """Silence the layers, and let the head answer each word's embedding with its successor."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
        layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)
    model.model.norm.weight = mx.ones_like(model.model.norm.weight)
    embeddings = np.array(model.model.embed_tokens.weight)
    head = np.zeros_like(embeddings)
    for word, successor in follows:
        head[_one(tokenizer, successor)] += embeddings[_one(tokenizer, word)]
    model.lm_head.weight = mx.array(head)


def _one(tokenizer: Tokenizer, word: str) -> int:
    ids = tokenizer.encode(word, add_special_tokens=False).ids
    assert len(ids) == 1, f"{word!r} is to be one token, not {ids}"
    return ids[0]


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE whose merges spell WORDS, and the control tokens."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        spelled = byte_level.pre_tokenize_str(word)[0][0]
        for end in range(2, len(spelled) + 1):
            left, right = spelled[: end - 1], spelled[end - 1]
            if left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in CONTROL])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: Path, template: str | None = TEMPLATE) -> None:
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": CONTROL[0],
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt of printable single-byte tokens; equal seeds share every prefix."""
    drawn = np.random.default_rng(1000 + seed).integers(10, 90, count)
    return tuple(int(token) for token in drawn)


def digests(arrays: Iterable[mx.array | np.ndarray[Any, Any]]) -> list[bytes]:
    """The bytes of arrays, to compare bit for bit whatever the dtype."""
    return [
        array.tobytes()
        if isinstance(array, np.ndarray)
        else np.array(array.view(mx.uint8)).tobytes()
        for array in arrays
    ]
