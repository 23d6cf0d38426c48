"""Text to token ids and back: `Tokenizer`, read from what a Hugging Face directory holds.

In order of preference: `tokenizer.json`; a sentencepiece `tokenizer.model`; `vocab.json` with
`merges.txt` (byte-level byte-pair encoding, GPT-2's or Qwen's way of cutting text into words).
`tokenizer_config.json` and `special_tokens_map.json` say which tokens are special and whether a
sequence begins with one; the chat template is in the former or in `chat_template.jinja`.
"""

import json
import numbers
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsInt

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from dms_jax.checkpoint import sentencepiece
from dms_jax.checkpoint.chat import render_chat
from dms_jax.checkpoint.files import read_json
from dms_jax.errors import CheckpointError, DataError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")

# How Qwen2 and later cut text into words before merging bytes within each.
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """Text to token ids and back, with the special tokens and the chat template of a checkpoint.

    Attributes:
        backend: the `tokenizers.Tokenizer` that does the work.
        special_tokens: name ("bos_token", ...) to text, of those that the checkpoint declares.
        chat_template: jinja source, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ):
        # Truncation and padding kept from training would change what a prompt means.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self._extra = dict(extra or {})
        for name, text in self.special_tokens.items():
            if backend.token_to_id(text) is None:
                raise CheckpointError(
                    f"the tokenizer declares {name} {text!r}, which is not in its vocabulary"
                )

    @classmethod
    def from_directory(cls, directory: str | pathlib.Path) -> "Tokenizer | None":
        """Read the tokenizer of a Hugging Face directory; None where there is none.

        Raises:
            CheckpointError: the files are damaged, or of a kind that is not served.
        """
        directory = pathlib.Path(directory)
        config = _read_optional(directory / "tokenizer_config.json")
        backend = _backend(directory, config)
        if backend is None:
            return None
        special = _special_tokens(directory, config)
        _apply_sequence_ends(backend, config, special)
        extra = {
            name: config[name]
            for name in ("tokenizer_class", "add_bos_token", "add_eos_token")
            if name in config
        }
        if not (directory / "tokenizer.json").is_file():
            # The slow classes would rebuild the tokenizer from the files that we do not write.
            extra["tokenizer_class"] = "PreTrainedTokenizerFast"
        return cls(
            backend,
            special_tokens=special,
            chat_template=_chat_template(directory, config),
            extra=extra,
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that `encode` can give."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a sequence, or None."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a sequence, or None."""
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the token that fills up a batch, or None."""
        return self._special_id("pad_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; the checkpoint decides whether a begin token is put in front.

        Text made by `apply_chat_template` holds its special tokens already: encode it with
        `add_special_tokens=False`.
        """
        if not isinstance(text, str):
            raise DataError(f"a text to encode must be a string, got {type(text).__name__}")
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[SupportsInt], skip_special_tokens: bool = True) -> str:
        """Text of `ids`.

        Raises:
            DataError: they are no token ids.
        """
        for index in ids:
            if type(index) is not int and (
                isinstance(index, bool) or not isinstance(index, numbers.Integral)
            ):
                raise DataError(f"token ids to decode must be whole numbers, got {index!r:.80}")
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Write a conversation as the model was trained to read it.

        Args:
            messages: `{"role": ..., "content": ...}` in order.
            add_generation_prompt: whether to open the assistant's turn.
            **variables: what the template understands besides (`tools`, `enable_thinking`, ...).

        Raises:
            DataError: the checkpoint has no chat template, or it refuses these messages.
        """
        template = self.chat_template
        if isinstance(template, Mapping):
            wanted = "tool_use" if variables.get("tools") and "tool_use" in template else "default"
            template = template.get(wanted)
        if template is None:
            raise DataError(
                "this checkpoint has no chat template: write the prompt as plain text, or set "
                "tokenizer.chat_template"
            )
        variables = {"tools": None, "documents": None} | self.special_tokens | variables
        return render_chat(
            template,
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            **variables,
        )

    def save(self, directory: str | pathlib.Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` into an existing directory."""
        directory = pathlib.Path(directory)
        self.backend.save(str(directory / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | self._extra | self.special_tokens
        config["clean_up_tokenization_spaces"] = False
        if isinstance(self.chat_template, Mapping):
            named = self.chat_template.items()
            config["chat_template"] = [{"name": n, "template": t} for n, t in named]
        elif self.chat_template is not None:
            config["chat_template"] = self.chat_template
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def _read_optional(path: pathlib.Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _backend(directory: pathlib.Path, config: dict[str, Any]) -> tokenizers.Tokenizer | None:
    fast, pieces = directory / "tokenizer.json", directory / "tokenizer.model"
    vocabulary, merges = directory / "vocab.json", directory / "merges.txt"
    if fast.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(fast))
        except Exception as error:  # the library raises nothing more precise
            raise CheckpointError(f"{fast.name} cannot be read as a tokenizer: {error}") from error
    if pieces.is_file():
        model = sentencepiece.parse(pieces.read_bytes())
        backend = sentencepiece.build(model)
        for name, index in (("bos_token", model.begin_id), ("eos_token", model.end_id)):
            if 0 <= index < len(model.pieces):
                config.setdefault(name, model.pieces[index])
        config.setdefault("unk_token", model.pieces[model.unknown_id])
        config.setdefault("add_bos_token", model.begin_id >= 0)
    elif vocabulary.is_file() and merges.is_file():
        backend = _byte_level(vocabulary, merges, _words(directory, config))
    else:
        return None
    _add_declared_tokens(backend, config)
    return backend


def _words(directory: pathlib.Path, config: Mapping[str, Any]) -> str:
    """Which way of cutting text into words goes with a vocabulary: "qwen" or "gpt2"."""
    name = config.get("tokenizer_class")
    if name is None:
        name = _read_optional(directory / "config.json").get("model_type")
    words = {"qwen2": "qwen", "qwen3": "qwen", "gpt2": "gpt2"}
    stem = str(name).removesuffix("Fast").removesuffix("Tokenizer").lower()
    if stem not in words:
        raise CheckpointError(
            f"vocab.json and merges.txt of tokenizer_class {name!r} are not served (served: "
            "Qwen2Tokenizer, GPT2Tokenizer); add a tokenizer.json"
        )
    return words[stem]


def _byte_level(vocabulary: pathlib.Path, merges: pathlib.Path, words: str) -> tokenizers.Tokenizer:
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(
            f"{vocabulary.name} and {merges.name} cannot be read as a tokenizer: {error}"
        ) from error
    backend = tokenizers.Tokenizer(model)
    if words == "qwen":
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def _add_declared_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Add `added_tokens_decoder`, whose keys are ids, and check that each gets its id."""
    declared = config.get("added_tokens_decoder") or {}
    try:
        declared = sorted((int(index), dict(token)) for index, token in declared.items())
        for index, token in declared:
            flags = {
                name: bool(token.get(name, False))
                for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            added = AddedToken(token["content"], **flags)
            (backend.add_special_tokens if flags["special"] else backend.add_tokens)([added])
            if backend.token_to_id(token["content"]) != index:
                raise CheckpointError(
                    f"the token {token['content']!r} should have id {index} but the vocabulary "
                    f"gives it {backend.token_to_id(token['content'])}; add a tokenizer.json"
                )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            "tokenizer_config.json: added_tokens_decoder is not a table of id to token"
        ) from error


def _special_tokens(directory: pathlib.Path, config: Mapping[str, Any]) -> dict[str, str]:
    fallback = _read_optional(directory / "special_tokens_map.json")
    special = {}
    for name in _SPECIAL:
        token = config.get(name)
        token = fallback.get(name) if token is None else token
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            special[name] = token
        elif token is not None:
            raise CheckpointError(f"tokenizer_config.json: {name} must be a text")
    return special


def _apply_sequence_ends(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Make the ends of a sequence what `add_bos_token` and `add_eos_token` ask, where they do.

    Silence leaves the post-processor of `tokenizer.json` in charge.
    """
    if not any(isinstance(config.get(f"add_{end}_token"), bool) for end in ("bos", "eos")):
        return
    now = backend.encode("", add_special_tokens=True).ids
    ends = {}
    for end, position in (("bos", 0), ("eos", -1)):
        text = special.get(f"{end}_token")
        index = None if text is None else backend.token_to_id(text)
        present = index is not None and bool(now) and now[position] == index
        wanted = config.get(f"add_{end}_token")
        wanted = present if not isinstance(wanted, bool) else wanted and index is not None
        ends[end] = (text, index, present, wanted)
    if all(present == wanted for _, _, present, wanted in ends.values()):
        return
    used = {end: (text, index) for end, (text, index, _, wanted) in ends.items() if wanted}
    backend.post_processor = processors.TemplateProcessing(
        single=[*([used["bos"][0]] if "bos" in used else []), "$A"]
        + ([used["eos"][0]] if "eos" in used else []),
        special_tokens=list(dict.fromkeys(used.values())),
    )


def _chat_template(
    directory: pathlib.Path, config: Mapping[str, Any]
) -> str | dict[str, str] | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in template}
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            "tokenizer_config.json: chat_template must be a text or a list of named texts"
        ) from error
