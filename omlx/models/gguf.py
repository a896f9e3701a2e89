"""Turn a llama-type GGUF file into a directory that mlx-lm loads, without loss.

MLX unpacks GGUF's Q4_0, Q4_1 and Q8_0 into its own affine form: packed integers in groups of 32
with float16 scales and biases. Two things are left to undo. llama.cpp stores the rows of q and k
interleaved, for its kind of rotary embedding; we put them back, so that the result is an ordinary
Llama. And the tokenizer lies in the metadata, as plain lists.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

GROUP = 32
_CONTROL, _USER_DEFINED = 3, 4

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


class NotConvertible(Exception):
    """The GGUF file is damaged, or not of the one kind that we convert."""


class Metadata:
    """The key-value part of a GGUF file. A key that is absent raises NotConvertible, naming it."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def _get(self, key: str) -> object:
        if key not in self._values:
            raise NotConvertible(f"the metadata has no {key}")
        return self._values[key]

    def has(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str) -> str:
        return str(self._get(key))

    def texts(self, key: str) -> list[str]:
        return cast(list[str], self._get(key))

    def whole(self, key: str) -> int:
        return int(cast(int, cast(mx.array, self._get(key)).item()))

    def real(self, key: str) -> float:
        """A float32, as the shortest decimal that names it: 1e-05, not 9.999999747e-06."""
        return float(f"{cast(mx.array, self._get(key)).item():.7g}")

    def wholes(self, key: str) -> list[int]:
        return cast(list[int], cast(mx.array, self._get(key)).tolist())


def convert(gguf: Path, target: Path) -> None:
    """Write model.safetensors, config.json, tokenizer and chat template into ``target``.

    Raises NotConvertible for another architecture, pre-tokenizer or tensor than we know.
    """
    try:
        arrays, values = cast(
            tuple[dict[str, mx.array], dict[str, object]],
            mx.load(str(gguf), return_metadata=True),
        )
    except (RuntimeError, ValueError) as error:
        raise NotConvertible(f"{gguf.name} is not a GGUF file that MLX reads: {error}") from error
    metadata = Metadata(values)
    if metadata.text("general.architecture") != "llama":
        raise NotConvertible(f"architecture {metadata.text('general.architecture')}, want llama")

    weights = convert_weights(arrays, metadata)
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})
    _write_json(target / "config.json", make_config(weights, metadata))
    make_tokenizer(metadata).save(str(target / "tokenizer.json"))
    _write_json(target / "tokenizer_config.json", make_tokenizer_config(metadata))
    template = metadata.text("tokenizer.chat_template")
    (target / "chat_template.jinja").write_text(template, encoding="utf-8")


def convert_weights(arrays: Mapping[str, mx.array], metadata: Metadata) -> dict[str, mx.array]:
    """Rename, un-interleave q and k, and store norms as float16 where that loses nothing."""
    num_heads = metadata.whole("llama.attention.head_count")
    num_kv_heads = metadata.whole("llama.attention.head_count_kv")
    weights: dict[str, mx.array] = {}
    for source, array in arrays.items():
        name = hf_name(source)
        if ".q_proj." in name:
            array = uninterleave(array, num_heads)
        elif ".k_proj." in name:
            array = uninterleave(array, num_kv_heads)
        if array.dtype == mx.float32:
            array = _narrowed(array)
        weights[name] = array
    return weights


def hf_name(name: str) -> str:
    """The name that mlx-lm's Llama has for this tensor: ``blk.0.attn_q.scales`` and its like."""
    stem, _, kind = name.rpartition(".")
    parts = stem.split(".")
    match parts:
        case ["blk", layer, part] if part in _BLOCK_TENSORS:
            return f"model.layers.{layer}.{_BLOCK_TENSORS[part]}.{kind}"
        case [part] if part in _TENSORS:
            return f"{_TENSORS[part]}.{kind}"
    raise NotConvertible(f"no place in a Llama for the tensor {name}")


def uninterleave(rows: mx.array, num_heads: int) -> mx.array:
    """Undo llama.cpp's order of the rows of q or k: pairs (0, half), (1, half + 1) .. per head.

    rows: (num_heads * head_dim, columns). Whole rows move, so packed weights may be given.
    """
    half = rows.shape[0] // num_heads // 2
    pairs = rows.reshape(num_heads, half, 2, rows.shape[1])
    return mx.contiguous(pairs.swapaxes(1, 2).reshape(rows.shape))


def _narrowed(array: mx.array) -> mx.array:
    half = array.astype(mx.float16)
    return half if mx.array_equal(half.astype(mx.float32), array).item() else array


def quantization(weights: Mapping[str, mx.array]) -> dict[str, object] | None:
    """The "quantization" of config.json: the most common width, and each layer that differs."""
    bits: dict[str, int] = {}
    for name, scales in weights.items():
        if name.endswith(".scales"):
            layer = name.removesuffix(".scales")
            num_columns = scales.shape[1] * GROUP
            bits[layer] = weights[f"{layer}.weight"].shape[1] * 32 // num_columns
    if not bits:
        return None
    usual = Counter(bits.values()).most_common(1)[0][0]
    others = {
        layer: {"group_size": GROUP, "bits": width, "mode": "affine"}
        for layer, width in sorted(bits.items())
        if width != usual
    }
    return {"group_size": GROUP, "bits": usual, "mode": "affine", **others}


def make_config(weights: Mapping[str, mx.array], metadata: Metadata) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata.whole("llama.embedding_length"),
        "intermediate_size": metadata.whole("llama.feed_forward_length"),
        "num_hidden_layers": metadata.whole("llama.block_count"),
        "num_attention_heads": metadata.whole("llama.attention.head_count"),
        "num_key_value_heads": metadata.whole("llama.attention.head_count_kv"),
        "head_dim": metadata.whole("llama.rope.dimension_count"),
        "rms_norm_eps": metadata.real("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.real("llama.rope.freq_base"),
        "max_position_embeddings": metadata.whole("llama.context_length"),
        "vocab_size": len(metadata.texts("tokenizer.ggml.tokens")),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": metadata.whole("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.whole("tokenizer.ggml.eos_token_id"),
    }
    widths = quantization(weights)
    if widths is None:
        config["torch_dtype"] = "float16"
    else:
        config["quantization"] = widths
    return config


def make_tokenizer(metadata: Metadata) -> Tokenizer:
    """SmolLM2's tokenizer: each digit apart, then GPT-2's words as bytes, then BPE."""
    kind = metadata.text("tokenizer.ggml.model"), metadata.text("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise NotConvertible(f"tokenizer {'/'.join(kind)}, want gpt2/smollm")
    tokens = metadata.texts("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in metadata.texts("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=cast(list[tuple[str, str]], merges),
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.wholes("tokenizer.ggml.token_type")
    for token, token_kind in zip(tokens, kinds, strict=True):
        if token_kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return tokenizer


def make_tokenizer_config(metadata: Metadata) -> dict[str, object]:
    tokens = metadata.texts("tokenizer.ggml.tokens")
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{role}_token": tokens[metadata.whole(f"tokenizer.ggml.{name}_token_id")]
        for role, name in roles.items()
        if metadata.has(f"tokenizer.ggml.{name}_token_id")
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata.whole("llama.context_length"),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **special,
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
