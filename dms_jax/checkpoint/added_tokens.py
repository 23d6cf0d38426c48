"""The tokens that the files beside a vocabulary declare, with the ids and flags of transformers.

Each generation of transformers declares special tokens, such as `<|im_end|>`, in other places:

    tokenizer.json          added_tokens, which the tokenizers library reads
    tokenizer_config.json   added_tokens_decoder: id to token
                            bos_token, eos_token, ...: a text or a token
                            additional_special_tokens or extra_special_tokens: a list or a table
    special_tokens_map.json the same names; read where there is no added_tokens_decoder, and then
                            its named tokens count rather than those of tokenizer_config.json
    added_tokens.json       text to id; read where there is no added_tokens_decoder

A tokenizer that lacks such a token silently splits it, so all of them are added here.
"""

import dataclasses
import pathlib
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from dms_jax.checkpoint.files import read_json
from dms_jax.checks import is_whole
from dms_jax.errors import CheckpointError, plain

# In the order in which transformers numbers tokens without an id.
NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# The default tokens of classes of transformers.
_DEFAULTS = {
    "llama": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "gpt2": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "qwen2": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
}
_EXTRA = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_CONFIG, _MAP = "tokenizer_config.json", "special_tokens_map.json"


@dataclasses.dataclass(frozen=True)
class DeclaredTokens:
    """The tokens that the files beside a vocabulary declare.

    Attributes:
        named: special tokens by name ("bos_token", ...).
        extra: special tokens without a name.
        by_id: tokens with required ids, in the order of the ids.
        defaults: texts of special tokens that only the class of transformers declares.
    """

    named: dict[str, AddedToken]
    extra: tuple[AddedToken, ...]
    by_id: tuple[tuple[int, AddedToken], ...]
    defaults: frozenset[str] = frozenset()

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Add them to a tokenizer, whose own ids take precedence.

        Warns if a token has another id than in a file, or gets one that no file specifies.

        Raises:
            CheckpointError: a token that the tokenizer lacks cannot get its id.
        """
        special = (*self.named.values(), *self.extra)
        names = {token.content for token in special}
        by_id = {
            index: _special(token) if token.content in names else token
            for index, token in self.by_id
        }
        # Look up one by one: a dictionary of a vocabulary of 150,000 takes a third of a second.
        texts = {token.content for token in by_id.values()}
        known = {text for text in texts if backend.token_to_id(text) is not None}
        held = {_key(token) for token in backend.get_added_tokens_decoder().values()}
        backend.add_tokens([token for token in by_id.values() if _key(token) not in held])
        for index, token in by_id.items():
            self._check_id(index, token.content, backend, known)
        flags = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        missing = {}
        for token in special:
            found = flags.get(token.content)
            if found is None or not found.special:
                missing.setdefault(token.content, _special(found or token))
        unknown = [text for text in missing if backend.token_to_id(text) is None]
        backend.add_tokens(list(missing.values()))
        new = [text for text in unknown if text not in self.defaults]
        if new:
            ids = ", ".join(f"{plain(repr(t), 40)} {backend.token_to_id(t)}" for t in new[:8])
            warnings.warn(
                "the tokenizer's files declare tokens that its vocabulary lacks; they get the next "
                f"ids, as in transformers: {ids}. If the model was trained with other ids, write "
                "them into added_tokens.json.",
                stacklevel=2,
            )

    def _check_id(
        self, index: int, text: str, backend: tokenizers.Tokenizer, known: Collection[str]
    ) -> None:
        found = backend.token_to_id(text)
        if found == index:
            return
        if text not in known:
            raise CheckpointError(
                f"the token {plain(repr(text))} should have id {index}, but the vocabulary gives "
                f"it {found}; write a tokenizer.json that holds it"
            )
        warnings.warn(
            f"tokenizer.json gives the token {plain(repr(text))} the id {found}, and the files "
            f"beside it say {index}; {found} is taken, as by transformers.",
            stacklevel=3,
        )


def read_declared_tokens(directory: pathlib.Path, config: Mapping[str, Any]) -> DeclaredTokens:
    """Read the tokens that a directory declares.

    Args:
        directory: the checkpoint.
        config: its tokenizer_config.json.

    Raises:
        CheckpointError: a file is damaged, or a declaration malformed.
    """
    tables = {_CONFIG: config}
    by_id: dict[int, AddedToken] = {}
    given = config.get("added_tokens_decoder")
    if given is not None:
        by_id = _by_id(given)
    else:
        tables[_MAP] = read_json(directory, _MAP) or {}
    named = {}
    for name in NAMED:
        for place, fields in tables.items():
            token = _token(fields.get(name), f"{place}: {name}")
            if token is not None:
                named[name] = token
            elif name in fields:
                named.pop(name, None)
    extra = tuple(_extra(tables))
    if given is None:
        name = "added_tokens.json"
        ids = read_json(directory, name) or {}
        special = {token.content for token in (*named.values(), *extra)}
        for text, index in ids.items():
            if not is_whole(index) or index < 0:
                raise CheckpointError(f"{name}: {plain(repr(text))} must have an id of 0 or more")
            by_id[index] = AddedToken(text, special=text in special)
    return DeclaredTokens(named, extra, tuple(sorted(by_id.items(), key=lambda entry: entry[0])))


def class_of(directory: pathlib.Path, config: Mapping[str, Any]) -> str | None:
    """The class of transformers that reads a tokenizer: "llama", "qwen2", "gpt2", ...; or None."""
    name = config.get("tokenizer_class")
    if name is None:
        fields = read_json(directory, "config.json") or {}
        name = fields.get("tokenizer_class") or fields.get("model_type")
        name = {"qwen3": "qwen2", "mistral": "llama"}.get(str(name), name)
    if name is None:
        return None
    return str(name).removesuffix("Fast").removesuffix("Tokenizer").lower()


def with_defaults(
    directory: pathlib.Path,
    config: Mapping[str, Any],
    declared: DeclaredTokens,
    backend: tokenizers.Tokenizer,
) -> DeclaredTokens:
    """Add the default tokens of the class of transformers where no file names one.

    Llama's are skipped if the vocabulary lacks them, because many models of other families name its
    class.
    """
    kind = class_of(directory, config) or ""
    more = {
        name: AddedToken(text, special=True)
        for name, text in _DEFAULTS.get(kind, {}).items()
        if name not in declared.named
        and config.get(name, name) is not None  # null: the model has no such token
        and (kind != "llama" or backend.token_to_id(text) is not None)
    }
    named = declared.named | more
    return dataclasses.replace(
        declared,
        named={name: named[name] for name in NAMED if name in named},
        defaults=frozenset(token.content for token in more.values()),
    )


def _special(token: AddedToken) -> AddedToken:
    """The same token, as a special one."""
    flags = {flag: getattr(token, flag) for flag in _FLAGS}
    return AddedToken(token.content, **flags | {"special": True})


def _key(token: AddedToken) -> tuple[Any, ...]:
    return (token.content, *(getattr(token, flag) for flag in _FLAGS))


def _token(value: Any, where: str) -> AddedToken | None:
    """A special token, as a text or as a table of text and flags."""
    text = value.get("content") if isinstance(value, Mapping) else value
    if value is None or text == "":  # the library ignores both, too
        return None
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if isinstance(value, Mapping) and isinstance(text, str):
        flags = {f: value[f] for f in _FLAGS if isinstance(value.get(f), bool) and f != "special"}
        return AddedToken(text, special=True, **flags)
    raise CheckpointError(f"{where} must be a text, or a table with one as its content")


def _extra(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[AddedToken]:
    """Special tokens that are listed, or have model-specific names.

    In transformers' order: named ones (`image_token`, but not `add_bos_token`, which is a boolean)
    come first.
    """
    listed = []
    for place, fields in tables.items():
        for name, value in fields.items():
            if name.endswith("_token") and name not in NAMED and isinstance(value, str) and value:
                yield AddedToken(value, special=True)
        for name in _EXTRA:
            where = f"{place}: {name}"
            value = fields.get(name)
            if value is None:
                continue
            if not isinstance(value, list | Mapping):
                raise CheckpointError(f"{where} must be a list of tokens")
            if isinstance(value, Mapping):
                yield from (t for each in value.values() if (t := _token(each, where)) is not None)
            else:
                listed += [t for each in value if (t := _token(each, where)) is not None]
    yield from listed


def _by_id(table: Any) -> dict[int, AddedToken]:
    """The tokens of added_tokens_decoder."""
    try:
        found = {}
        for index, token in table.items():
            flags = {flag: bool(token[flag]) for flag in _FLAGS if token.get(flag) is not None}
            found[int(index)] = AddedToken(token["content"], **flags)
        return found
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{_CONFIG}: added_tokens_decoder is not a table of id to token"
        ) from error
