"""Build the tokenizer of a GGUF file from its metadata.

`tokenizer.ggml.model` is the kind: "gpt2" for byte-level byte-pair encoding, with the pre-tokenizer
named by `tokenizer.ggml.pre`; "llama" for a sentencepiece model, whose pieces are merged by score.
Each token has a type, numbered as in sentencepiece. Some files give control tokens the type of
text; `_Vocabulary` corrects that.
"""

import re
import warnings
from typing import Any

import tokenizers

from dms_jax.checkpoint.gguf import backends
from dms_jax.checkpoint.gguf.backends import PieceType, Words
from dms_jax.checkpoint.gguf.file import GgufFiles
from dms_jax.checkpoint.tokenizer import Tokenizer, apply_sequence_ends, library_errors
from dms_jax.checks import check
from dms_jax.errors import CheckpointError, plain
from dms_jax.model.language_model import GenerationDefaults

_KEY = "tokenizer.ggml."
# Of Qwen2 and later.
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = _QWEN_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# An upper-case letter after a lower-case one begins a word: hello|World.
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_WORDS = _CASED_WORDS % ("", "", "")
_O200K_WORDS = _CASED_WORDS % (*[r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"] * 2, "{1,3}")

_GPT2 = Words((_GPT2_WORDS,))
_DIGITS = Words((r"\p{N}", _GPT2_WORDS))
_LLAMA3 = Words((_LLAMA3_WORDS,), whole=True, begin=True)
_QWEN2 = Words((_QWEN_WORDS,), nfc=True)
_WORDS = {
    "default": Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "exaone": _DIGITS,
    "minerva-7b": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": Words((_LLAMA3_WORDS,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "deepseek-coder": Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "gpt-4o": Words((_O200K_WORDS,), whole=True),
    "tekken": Words((_TEKKEN_WORDS,), whole=True, begin=True),
}

# Tokens that always end an answer, as in llama.cpp: many files declare only the token that ends a
# text, not the one that ends a turn.
_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
# Tokens of harmony, in which <|end|> ends a message, and an answer may have several messages.
_HARMONY = {"<|return|>", "<|call|>", "<|end|>"}
# Marks: <|im_start|>, <start_of_turn>, [INST], </s>, which structure a conversation. Others
# (<think>, <tool_call>) are part of the text.
_MARK = re.compile(r"<\S+>|\[/?[A-Z_]+\]")
_STRUCTURE = re.compile(r"<([|\uff5c]).*\1>|</?s>|<(start|end)_of_\w+>|\[/?[A-Z_]+\]")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "padding_token_id")


def read_tokenizer(
    files: GgufFiles, vocab_size: int
) -> tuple[Tokenizer | None, GenerationDefaults]:
    """Reads the tokenizer of a model (None if there is none) and its special tokens.

    Args:
        files: its metadata.
        vocab_size: rows of the embedding, at least the number of tokens.

    Raises:
        CheckpointError: the metadata are damaged, or describe a tokenizer that is not supported
          exactly.
        ConfigError: an entry has the wrong type.
    """
    kind = files.metadata.get(_KEY + "model", "none")
    if kind in ("none", "no_vocab"):
        return None, GenerationDefaults()
    template = _chat_template(files)
    vocabulary = _Vocabulary(files, template)
    with library_errors(CheckpointError, f"the tokenizer of {files.name} cannot be built"):
        if kind == "gpt2":
            backend, begins = _byte_level(vocabulary)
        elif kind == "llama":
            backend, begins = _sentencepiece(vocabulary), True
        else:
            raise CheckpointError(
                f"{files.name} has a tokenizer of the kind {plain(repr(kind))} ({_KEY}model), "
                "which is not supported; supported: gpt2, llama"
            )
        special = {
            f"{name}_token": vocabulary.tokens[index]
            for name, index in (
                ("bos", vocabulary.token_id("bos_token_id", 1 if kind == "llama" else None)),
                ("eos", vocabulary.token_id("eos_token_id", 2 if kind == "llama" else None)),
                ("unk", vocabulary.token_id("unknown_token_id", 0 if kind == "llama" else None)),
                ("pad", vocabulary.token_id("padding_token_id", None)),
            )
            if index is not None
        }
        ends = {
            "add_bos_token": vocabulary.get("add_bos_token", bool, begins),
            "add_eos_token": vocabulary.get("add_eos_token", bool, False),
        }
        if ends["add_bos_token"] and "bos_token" not in special and begins is not True:
            raise CheckpointError(
                f"{files.name} asks for a begin token ({_KEY}add_bos_token) and names none "
                f"({_KEY}bos_token_id)"
            )
        apply_sequence_ends(backend, ends, special)
    if len(vocabulary.tokens) > vocab_size:
        raise CheckpointError(
            f"{files.name} has {len(vocabulary.tokens)} tokens, and token_embd.weight {vocab_size} "
            "rows: they are not of one model"
        )
    tokenizer = Tokenizer(
        backend,
        special_tokens=special,
        chat_template=template,
        extra=ends | {"tokenizer_class": "PreTrainedTokenizerFast"},
    )
    return tokenizer, GenerationDefaults(
        eos_token_ids=_end_tokens(vocabulary, tokenizer.eos_token_id),
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


class _Vocabulary:
    """The tokens of a file.

    Converters often give a token that ends a turn the type of text; it would then be split in every
    prompt and never end an answer. So, as in llama.cpp, these are control tokens regardless of
    their type: tokens that always end an answer (`_ENDS`), tokens named in the metadata as begin,
    end or padding, and tokens in the chat template that look like marks and are not produced by
    merges.

    Attributes:
        tokens: text of every token.
        types: type of every token.
        ids: id of every text.
    """

    def __init__(self, files: GgufFiles, template: str | dict[str, str] | None):
        self.name = files.name
        self._metadata = files.metadata
        tokens = self.get("tokens", list, None)
        if not tokens or not all(isinstance(token, str) for token in tokens):
            raise CheckpointError(f"{self.name}: {_KEY}tokens is not a list of texts")
        self.tokens: list[str] = tokens
        types = self.get("token_type", list, [_guessed(token) for token in tokens])
        if types is None:
            raise CheckpointError(f"{self.name}: {_KEY}token_type is not a list of types of tokens")
        try:
            self.types = [PieceType(kind) for kind in types]
        except ValueError as error:
            raise CheckpointError(
                f"{self.name}: {_KEY}token_type holds an unknown token type: {plain(error)}"
            ) from error
        if len(types) != len(tokens):
            raise CheckpointError(
                f"{self.name}: {_KEY}token_type has {len(types)} entries for {len(tokens)} tokens"
            )
        self.ids = {token: index for index, token in enumerate(tokens)}
        if len(self.ids) != len(tokens):
            twice = next(t for index, t in enumerate(tokens) if self.ids[t] != index)
            raise CheckpointError(
                f"{self.name}: {_KEY}tokens holds {plain(repr(twice))} twice, so that text does "
                "not say which is meant"
            )
        named = template.values() if isinstance(template, dict) else [template or ""]
        self._retype("\n".join(named))

    def _retype(self, template: str) -> None:
        """Corrects the type of control tokens declared as text."""
        merges = self.get("merges", list, None) or []
        made = {merge.replace(" ", "", 1) for merge in merges if isinstance(merge, str)}
        declared = {self._metadata.get(_KEY + name) for name in _SPECIAL_IDS}
        wrong = []
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind not in (PieceType.NORMAL, PieceType.UNUSED) or token in made:
                continue
            marks = token in _ENDS or (_MARK.fullmatch(token) and not _BYTE.fullmatch(token))
            if not marks or not (token in _ENDS or index in declared or token in template):
                continue
            control = token in _ENDS or index in declared or _STRUCTURE.fullmatch(token)
            self.types[index] = PieceType.CONTROL if control else PieceType.USER_DEFINED
            wrong.append(token)
        if wrong:
            listed = ", ".join(plain(repr(token), 40) for token in wrong[:8])
            warnings.warn(
                f"{self.name} types as text ({_KEY}token_type) tokens that its chat template or "
                f"metadata use whole: {listed}{' ...' if len(wrong) > 8 else ''}. They "
                "are taken as whole tokens, as by llama.cpp.",
                stacklevel=2,
            )

    def get(self, key: str, kind: Any, default: Any) -> Any:
        """Reads and checks an entry; the default if there is none."""
        value = self._metadata.get(_KEY + key, default)
        if kind is list:
            return value if isinstance(value, list) else None
        return value if value is default else check(f"{self.name}: {_KEY}{key}", value, kind)

    def token_id(self, key: str, default: int | None) -> int | None:
        """The id of a special token; without one, the default if that is a control token.

        # Converters write -1 and 2^32 - 1 for none.
        """
        given = self.get(key, int, None)
        if given is not None:
            if given in (-1, 2**32 - 1):
                return None
            if not 0 <= given < len(self.tokens):
                raise CheckpointError(
                    f"{self.name}: {_KEY}{key} is {given}, beyond the {len(self.tokens)} tokens"
                )
            return given
        control = (PieceType.CONTROL, PieceType.UNKNOWN)
        if default is None or default >= len(self.types) or self.types[default] not in control:
            return None
        return default


def _guessed(token: str) -> int:
    """The type of a token in a file without types: text, except for sentencepiece's own tokens."""
    if _BYTE.fullmatch(token):
        return int(PieceType.BYTE)
    return int(PieceType.UNKNOWN if token == "<unk>" else PieceType.NORMAL)


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Builds the tokenizer; also returns whether texts begin with the begin token by default."""
    pre = vocabulary.get("pre", str, None)
    if pre not in _WORDS:
        said = "does not say how" if pre is None else f"says {plain(repr(pre))} for how"
        raise CheckpointError(
            f"{vocabulary.name} {said} text is cut into words ({_KEY}pre), which is not supported; "
            f"supported: {', '.join(_WORDS)}"
        )
    words = _WORDS[pre]
    merges = vocabulary.get("merges", list, None)
    if merges is None:
        raise CheckpointError(f"{vocabulary.name} lacks {_KEY}merges")
    pairs = []
    for number, merge in enumerate(merges):
        pair = tuple(merge.split(" ")) if isinstance(merge, str) else ()
        if len(pair) != 2 or pair[0] + pair[1] not in vocabulary.ids:
            raise CheckpointError(
                f"{vocabulary.name}: {_KEY}merges holds {plain(repr(merge))} (number {number}), "
                "which is not a pair of tokens that form a token"
            )
        pairs.append(pair)
    backend = backends.byte_level(vocabulary.tokens, vocabulary.types, pairs, words)
    return backend, words.begin


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    scores = vocabulary.get("scores", list, None)
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{vocabulary.name}: {_KEY}scores is not a list of one number for each token"
        )
    normal = {
        score
        for score, kind in zip(scores, vocabulary.types, strict=True)
        if kind == PieceType.NORMAL
    }
    if len(normal) == 1 and len(scores) > 1:
        raise CheckpointError(
            f"{vocabulary.name}: all of {_KEY}scores are equal, so they do not say which "
            "pieces are merged first; convert the model again from its tokenizer.model"
        )
    if vocabulary.get("precompiled_charsmap", list, None):
        raise CheckpointError(
            f"{vocabulary.name} maps characters before it splits text "
            f"({_KEY}precompiled_charsmap), which is not supported"
        )
    # In Gemma's files it has the type of a control token and is named separately.
    unknown = vocabulary.token_id("unknown_token_id", None)
    if PieceType.UNKNOWN in vocabulary.types:
        unknown = vocabulary.types.index(PieceType.UNKNOWN)
    if unknown is None:
        raise CheckpointError(
            f"{vocabulary.name}: none of {_KEY}tokens is of the type for unknown text"
        )
    return backends.sentencepiece(
        vocabulary.tokens,
        vocabulary.types,
        scores,
        unknown=unknown,
        prefix=vocabulary.get("add_space_prefix", bool, True),
        strip=vocabulary.get("remove_extra_whitespaces", bool, False),
    )


def _end_tokens(vocabulary: _Vocabulary, end: int | None) -> tuple[int, ...]:
    """Tokens that end an answer: end of text, of turn and of message."""
    named = [end, *(vocabulary.token_id(f"{name}_token_id", None) for name in ("eot", "eom"))]
    special = (PieceType.CONTROL, PieceType.USER_DEFINED)
    known = (vocabulary.ids.get(text) for text in _ENDS)
    known = [index for index in known if index is not None and vocabulary.types[index] in special]
    found = dict.fromkeys(index for index in (*named, *known) if index is not None)
    if vocabulary.ids.keys() >= _HARMONY:
        found.pop(vocabulary.ids["<|end|>"], None)
    return tuple(found)


def _chat_template(files: GgufFiles) -> str | dict[str, str] | None:
    """Reads the chat template, or several by name."""
    key = "tokenizer.chat_template"
    names = files.metadata.get(key + "s", [])
    keys = {"default": key}
    if isinstance(names, list):
        keys |= {name: f"{key}.{name}" for name in names if isinstance(name, str)}
    found = {name: files.metadata[where] for name, where in keys.items() if where in files.metadata}
    for name, template in found.items():
        if not isinstance(template, str):
            raise CheckpointError(f"{files.name}: {keys[name]} must be a text")
    if not found:
        return None
    return found["default"] if list(found) == ["default"] else found
