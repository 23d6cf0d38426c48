"""The special tokens that tokenizer_config.json declares beside the vocabulary of tokenizer.json.

    added_tokens_decoder        id to token
    bos_token, eos_token, ...   a text or a token
    additional_special_tokens   a list, or a table under model-specific names; newer versions of
                                transformers write extra_special_tokens

A tokenizer that lacks such a token silently splits it, so all of them are added here.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

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
_EXTRA = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_CONFIG = "tokenizer_config.json"


def add_declared_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> dict[str, str]:
    """Add the tokens of a config to a tokenizer; warn if a token gets an id that no file specifies.

    Args:
        backend: the tokenizer, whose own ids take precedence.
        config: the contents of tokenizer_config.json.

    Returns:
        the special tokens that have names ("bos_token", ...).

    Raises:
        CheckpointError: a declaration is malformed, or a token's id differs from the declared one.
    """
    given = {name: _token(config.get(name), name) for name in NAMED}
    named = {name: token for name, token in given.items() if token is not None}
    special: dict[str, AddedToken] = {}
    for token in (*named.values(), *_extra(config)):
        special.setdefault(token.content, token)
    _add_numbered(backend, _numbered(config), special)
    held = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    missing = {text: held.get(text, token) for text, token in special.items()}
    missing = {
        text: token for text, token in missing.items() if text not in held or not token.special
    }
    new = [text for text in missing if backend.token_to_id(text) is None]
    for token in missing.values():
        token.special = True
    backend.add_tokens(list(missing.values()))
    if new:
        ids = ", ".join(f"{plain(repr(t), 40)} {backend.token_to_id(t)}" for t in new[:8])
        warnings.warn(
            "the tokenizer's files declare tokens that its vocabulary lacks; they get the next "
            f"ids, as in transformers: {ids}. If the model was trained with other ids, write "
            "them into tokenizer.json.",
            stacklevel=2,
        )
    return {name: token.content for name, token in named.items()}


def _add_numbered(
    backend: tokenizers.Tokenizer,
    numbered: Mapping[int, AddedToken],
    special: Mapping[str, AddedToken],
) -> None:
    """Add tokens with declared ids, in the order of the ids."""
    held = {_key(token) for token in backend.get_added_tokens_decoder().values()}
    for token in numbered.values():
        token.special = token.special or token.content in special
    new = [token for _, token in sorted(numbered.items()) if _key(token) not in held]
    known = {token.content for token in new if backend.token_to_id(token.content) is not None}
    backend.add_tokens(new)
    for index, token in numbered.items():
        text = token.content
        if token in new and text not in known and (found := backend.token_to_id(text)) != index:
            raise CheckpointError(
                f"the token {plain(repr(text))} should have id {index}, but the vocabulary gives "
                f"it {found}; write a tokenizer.json that holds it"
            )


def _key(token: AddedToken) -> tuple[Any, ...]:
    return (token.content, *(getattr(token, flag) for flag in _FLAGS))


def _token(value: Any, name: str) -> AddedToken | None:
    """A special token, as a text or as a table of text and flags."""
    text = value.get("content") if isinstance(value, Mapping) else value
    if value is None or text == "":  # the library ignores both, too
        return None
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if isinstance(value, Mapping) and isinstance(text, str):
        flags = {f: value[f] for f in _FLAGS if isinstance(value.get(f), bool) and f != "special"}
        return AddedToken(text, special=True, **flags)
    raise CheckpointError(f"{_CONFIG}: {name} must be a text, or a table with one as its content")


def _extra(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Special tokens that are listed, or have model-specific names.

    In transformers' order: named ones (`image_token`, but not `add_bos_token`, which is a boolean)
    come first.
    """
    listed = []
    for name, value in config.items():
        if name.endswith("_token") and name not in NAMED and isinstance(value, str) and value:
            yield AddedToken(value, special=True)
    for name in _EXTRA:
        value = config.get(name)
        if value is not None and not isinstance(value, list | Mapping):
            raise CheckpointError(f"{_CONFIG}: {name} must be a list of tokens")
        if isinstance(value, Mapping):
            yield from (t for each in value.values() if (t := _token(each, name)) is not None)
        else:
            listed += [t for each in value or () if (t := _token(each, name)) is not None]
    yield from listed


def _numbered(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The tokens of added_tokens_decoder."""
    try:
        found = {}
        for index, token in (config.get("added_tokens_decoder") or {}).items():
            flags = {flag: bool(token[flag]) for flag in _FLAGS if token.get(flag) is not None}
            found[int(index)] = AddedToken(token["content"], **flags)
        return found
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{_CONFIG}: added_tokens_decoder is not a table of id to token"
        ) from error
