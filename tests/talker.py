"""A tiny model that says what a test wants, with the markup of a real family: thoughts and calls.

It is tape's idea with more tapes: each word, which is one token, has one successor, and the
template's last word chooses where to begin. So a word stands on one tape only, and the markers are
cut differently on each: ``<tool`` ``_call>`` on one, ``<tool_call>\\n`` on another.

    (none)    thinks, says something, calls a tool; its words are those that the template renders,
              so that the next turn is the same tokens
    <think>   the same word as the end of the prompt: the template begins the thought
    the others are in TAPES, by the word that ``opening`` has to be
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import AddedToken

from tests import tiny

EOS = tiny.EOS
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

LOOK = {"name": "look", "arguments": {"city": "Paris"}}

TAPES: dict[str, tuple[str, ...]] = {
    "\n": (
        *("<think>\n", "hm, ", "so\n", "</think>\n\n", "Let me ", "look.\n"),
        *("<tool_call>\n", '{"name": "look", ', '"arguments": {"city": ', '"Paris"}}\n'),
        *("</tool_call>", EOS),
    ),
    " twice": (
        *("<tool", "_call>", '{"name": "lo', 'ok", "arguments": {"city": "Rome"}}', "</tool"),
        *("_call>\n", '<tool_call>{"name": "look"', ', "arguments": {"city": "Oslo"}}<', "/too"),
        *("l_call>", EOS),
    ),
    " broken": ("Well. ", "<tool_call", ">{look Paris!", "<", "/tool_call", "> Sorry.", EOS),
    " thinks": ("<t", "hink", ">I ", "think<", "/think", ">I am", ".", EOS),
    " endless": ("<th", "ink>what ", "is ", "all ", "this ", "about", EOS),
    "<think>": ("a thought", "</", "think>\n\n", "an answer", EOS),
    " plain": ("4 <", " 5 and ", "<thin", " air>", EOS),
    " unasked": (
        "so: ",
        "<tool_",
        "call>",
        '{"na',
        'me": "look", "arguments": {}}',
        "</t",
        "ool_call>",
        EOS,
    ),
}
"""By the word before. All are said from the top of an answer, whatever was asked."""
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n"
    "</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{% set tool_call = call.function %}"
    "{% if message.content or not loop.first %}{{ '\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ tool_call.name }}", "arguments": '
    "{% if tool_call.arguments is string %}{{ tool_call.arguments }}"
    "{% else %}{{ tool_call.arguments | tojson }}{% endif %}}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ opening }}{% if opens %}<think>{% endif %}{% endif %}"
)


def build(folder: Path, template: str = TEMPLATE) -> Path:
    """Write the model below ``folder``."""
    path = folder / "talker"
    path.mkdir(parents=True)
    follows = [pair for first, tape in TAPES.items() for pair in pairwise((first, *tape))]
    assert len({word for word, _ in follows}) == len(follows), "a word has one successor"
    tokenizer = tiny.make_tokenizer()
    words = {word for tape in follows for word in tape} - {"\n", EOS}
    added = sorted(words.union(MARKERS))
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in added])
    config = {
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": tiny.CONTEXT,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id(EOS),
    }
    model = tiny.make(config)
    tiny.read_off(model, tokenizer, follows)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    tiny.save_tokenizer(tokenizer, path, template)
    return path
