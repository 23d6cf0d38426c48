"""Tokenizer directories in published layouts, for this library and transformers.

`TABLE` has the files of well-known models, with the vocabularies of `tests/golden/tokenizers`. This
module needs neither dms_jax nor transformers: `tests/golden/make_layouts.py` writes the same
directories and records what transformers reads.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "tokenizers"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hello"}]


def token(text: str, **flags: bool) -> dict[str, Any]:
    """A token as tokenizer_config.json writes it."""
    usual = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"__type": "AddedToken", "content": text} | usual | flags


def entry(text: str, special: bool = True, **flags: bool) -> dict[str, Any]:
    """A token as added_tokens_decoder writes it."""
    usual = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": text} | usual | {"special": special} | flags


def begins(text: str, index: int) -> dict[str, Any]:
    """A post-processor that puts a token in front of a text."""
    return ends({"front": (text, index)})


def ends(tokens: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    """A post-processor that puts tokens in front of a text and after it."""

    def special(place: str) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": tokens[place][0], "type_id": 0}}] if place in tokens else []

    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [*special("front"), sequence, *special("back")],
        "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            text: {"id": text, "ids": [index], "tokens": [text]} for text, index in tokens.values()
        },
    }


def vocabulary(kind: str) -> dict[str, int]:
    """A byte vocabulary with consecutive ids."""
    ids = _golden(kind)["model"]["vocab"]
    return {text: place for place, text in enumerate(sorted(ids, key=ids.__getitem__))}


def size(kind: str) -> int:
    """The number of tokens of a vocabulary of bytes."""
    return len(vocabulary(kind))


def fast(kind: str, added: Sequence[tuple[int, str]] = (), **parts: Any) -> dict[str, Any]:
    """A tokenizer.json with consecutive ids and these special tokens."""
    found = _golden(kind)
    found["model"]["vocab"] = vocabulary(kind)
    found["added_tokens"] = [{"id": index} | entry(text) for index, text in added]
    return found | parts


def _golden(kind: str) -> dict[str, Any]:
    return json.loads((GOLDEN / kind / "tokenizer.json").read_text())


def _after(kind: str, *texts: str) -> list[tuple[int, str]]:
    return [(size(kind) + place, text) for place, text in enumerate(texts)]


def _decoder(tokens: list[tuple[int, str]]) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(index): entry(text) for index, text in tokens}}


_QWEN = _after("qwen2", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>")
_LLAMA3 = _after("gpt2", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")
_DEEPSEEK = _after("gpt2", "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\uff5c>")
_SMOL = [(index, text) for index, (_, text) in enumerate(_QWEN[:3])]
_MISTRAL_PIECES = 817

# Name: the files, as JSON or text.
TABLE: dict[str, dict[str, Any]] = {
    "qwen1.5: turns in added_tokens.json": {
        "tokenizer.json": fast("qwen2"),
        "tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer", "unk_token": None},
        "added_tokens.json": {text: index for index, text in _QWEN[:3]},
        "special_tokens_map.json": {
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
        },
    },
    "vicuna: a padding token of its own": {
        "tokenizer.json": _golden("mistral"),
        "tokenizer_config.json": {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": True,
            "bos_token": token("<s>"),
            "eos_token": token("</s>"),
            "unk_token": token("<unk>"),
            "legacy": True,
        },
        "added_tokens.json": {"<pad>": _MISTRAL_PIECES},
        "special_tokens_map.json": {"pad_token": "<pad>"},
    },
    "llama 3": {
        "tokenizer.json": fast("gpt2", _LLAMA3, post_processor=begins(_LLAMA3[0][1], size("gpt2"))),
        "tokenizer_config.json": _decoder(_LLAMA3)
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "chat_template": "{{ bos_token }}{{ messages[0].content }}<|eot_id|>",
        },
        "special_tokens_map.json": {
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
        },
    },
    "deepseek's distilled qwen": {
        "tokenizer.json": fast(
            "gpt2", _DEEPSEEK, post_processor=begins(_DEEPSEEK[0][1], size("gpt2"))
        ),
        "tokenizer_config.json": {
            "tokenizer_class": "LlamaTokenizerFast",
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": token(_DEEPSEEK[0][1], normalized=True),
            "eos_token": token(_DEEPSEEK[1][1], normalized=True),
            "pad_token": token(_DEEPSEEK[1][1], normalized=True),
            "unk_token": None,
            "legacy": True,
        },
    },
    "a fine-tune whose turns are in the config alone": {
        "tokenizer.json": fast("gpt2", _LLAMA3[:2]),
        "tokenizer_config.json": _decoder(_LLAMA3)
        | {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eot_id|>"},
    },
    "saved by transformers 5": {
        "tokenizer.json": fast("qwen2", _QWEN),
        "tokenizer_config.json": {
            "backend": "tokenizers",
            "tokenizer_class": "TokenizersBackend",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "extra_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "is_local": True,
        },
        "chat_template.jinja": CHATML,
    },
    "smollm2": {
        "tokenizer.json": fast("gpt2", _after("gpt2", *(text for _, text in _SMOL))),
        "tokenizer_config.json": _decoder(_after("gpt2", *(text for _, text in _SMOL)))
        | {
            "tokenizer_class": "GPT2Tokenizer",
            "add_prefix_space": False,
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "chat_template": CHATML,
        },
    },
    "an embedding model: texts end in a token": {
        "tokenizer.json": fast(
            "qwen2", _QWEN, post_processor=ends({"back": ("<|endoftext|>", _QWEN[0][0])})
        ),
        "tokenizer_config.json": _decoder(_QWEN)
        | {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"},
    },
    "no tokenizer_config.json": {
        "tokenizer.json": fast("qwen2", _QWEN),
        "config.json": {"model_type": "qwen2"},
    },
}


def write(directory: pathlib.Path, written: Mapping[str, Any]) -> None:
    """Write the files of a layout."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in written.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / name).write_text(text, encoding="utf-8")


def texts(written: Mapping[str, Any]) -> list[str]:
    """Texts to encode: plain ones, and some with each token declared in a layout's files."""
    declared: list[str] = []

    def collect(value: Any, key: str = "") -> None:
        if isinstance(value, Mapping):
            if isinstance(value.get("content"), str):
                declared.append(value["content"])
            for name, inner in value.items():
                collect(inner, name)
        elif isinstance(value, list):
            for inner in value:
                collect(inner, key)
        elif isinstance(value, str) and (key.endswith(("_token", "_tokens"))):
            declared.append(value)

    for name, content in written.items():
        if name == "tokenizer.json":
            collect(content["added_tokens"])
        elif name == "added_tokens.json":
            declared.extend(content)
        elif name != "config.json":
            collect(content)
    spelled = list(dict.fromkeys(declared))
    plain = ["Hello world", "a  b"]
    return plain + [f"Hello{text}a {text} b" for text in spelled] + ["".join(spelled)]
