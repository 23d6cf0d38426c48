"""Text to token ids and back: `Tokenizer`, read from a Hugging Face directory.

`tokenizer.json` holds the vocabulary. `tokenizer_config.json` and files beside it declare special
tokens (`added_tokens.py`), and whether a text begins with one. The chat template is in
`tokenizer_config.json`, in `chat_template.jinja` or, for some vision models, in
`chat_template.json`.
"""

import contextlib
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsInt

import tokenizers
from tokenizers import processors

from dms_jax.checkpoint.added_tokens import class_of, read_declared_tokens, with_defaults
from dms_jax.checkpoint.files import expanded, find, read, read_json, read_text
from dms_jax.checks import is_whole
from dms_jax.errors import CheckpointError, DataError, DmsJaxError, plain

_TEMPLATE, _MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_MOST_TEMPLATES = 32
# Files of tokenizers that transformers converts into a tokenizer.json.
OTHER_LAYOUTS = ("tokenizer.model", "merges.txt")
_LONG = 2**16  # letters of a text that takes a tenth of a second
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # the byte fallback of sentencepiece
# Byte-level tokens are written with one letter per byte: printable Latin-1 bytes as themselves, the
# others as the characters from 256 on, in order.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES_BY_LETTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(_OTHERS)
}


class Tokenizer:
    """Text to token ids and back, with the special tokens and the chat template of a checkpoint.

    Attributes:
        backend: the underlying `tokenizers.Tokenizer`.
        special_tokens: name ("bos_token", ...) -> text, as the checkpoint declares.
        chat_template: jinja source, or None.
        template_variables: default variables of the template; see `LanguageModel.with_template`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ):
        # Drop truncation and padding settings from training, which would change prompts.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.template_variables: dict[str, Any] = {}
        self._extra = dict(extra or {})
        for name, text in self.special_tokens.items():
            if backend.token_to_id(text) is None:
                raise CheckpointError(
                    f"the tokenizer declares {name} {plain(repr(text))}, which is not in its "
                    "vocabulary"
                )

    @classmethod
    def from_directory(cls, directory: str | pathlib.Path) -> "Tokenizer | None":
        """Reads the tokenizer of a Hugging Face directory; None if there is none.

        Raises:
            CheckpointError: the files are damaged, or hold a tokenizer and no tokenizer.json.
        """
        directory = expanded(directory, "the path of a tokenizer must be a directory")
        config = read_json(directory, "tokenizer_config.json")
        config = {} if config is None else config
        with library_errors(CheckpointError, "the tokenizer's files cannot be read"):
            backend = _read_backend(directory)
            if backend is None:
                return None
            declared = with_defaults(
                directory, config, read_declared_tokens(directory, config), backend
            )
            declared.add_to(backend)
            special = {name: token.content for name, token in declared.named.items()}
            # Only Llama's class honours these fields.
            if (class_of(directory, config) or "llama") == "llama":
                apply_sequence_ends(backend, config, special)
            backend.encode_special_tokens = config.get("split_special_tokens") is True
        extra = {
            name: config[name]
            for name in (
                "tokenizer_class",
                "add_bos_token",
                "add_eos_token",
                "split_special_tokens",
            )
            if name in config
        }
        return cls(
            backend,
            special_tokens=special,
            chat_template=_chat_template(directory, config),
            extra=extra,
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that `encode` can return."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

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
        """Id of the padding token, or None."""
        return self._special_id("pad_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text that the model will continue.

        The checkpoint decides which tokens begin the text. No end token is added, even if the
        checkpoint asks for one (`add_eos_token`), because the model continues the text.

        The output of `apply_chat_template` already contains its special tokens: encode it with
        `add_special_tokens=False`.

        Raises:
            DataError: the argument is not a text, or the tokenizer fails on it.
        """
        if not isinstance(text, str):
            raise DataError(f"a text to encode must be a string, got {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"the text to encode holds half of a surrogate pair ({text[error.start]!r} at "
                f"place {error.start}), which is not a character: it was decoded wrongly"
            ) from error
        with library_errors(DataError, "the tokenizer failed on the text"):
            if len(text) < _LONG:
                found = self.backend.encode(text, add_special_tokens=add_special_tokens)
            else:  # `encode` would hold Python's lock throughout: 7 s for 4 MB
                (found,) = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
            return (
                found.ids[: len(found) - self._ending(found)] if add_special_tokens else found.ids
            )

    def decode(self, ids: Iterable[SupportsInt], skip_special_tokens: bool = True) -> str:
        """Decodes token ids.

        Raises:
            DataError: they are not token ids.
        """
        whole: list[Any] = list(ids)
        if set(map(type, whole)) != {int}:
            for index in whole:
                if not is_whole(index):
                    raise DataError(f"token ids to decode must be whole numbers, got {index!r:.80}")
            whole = [int(index) for index in whole]
        if whole and not 0 <= min(whole) <= max(whole) < 2**32:
            raise DataError("token ids to decode must lie in 0 ... 2^32 - 1")
        # Streams decode a few tokens at a time, so enter `library_errors` only after an error.
        try:
            return self.backend.decode(whole, skip_special_tokens=skip_special_tokens)
        except BaseException:
            with library_errors(DataError, "the tokenizer failed on the token ids"):
                raise

    def bytes_of(self, token: int) -> bytes | None:
        """The UTF-8 bytes of a token, which may be part of a character; None if unknown."""
        once, twice = (self.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        if "\ufffd" not in twice:
            return twice[len(once) :].encode()  # decoding may drop the first token's space
        piece = self.backend.id_to_token(token) or ""
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        known = all(letter in _BYTES_BY_LETTER for letter in piece)
        return bytes(map(_BYTES_BY_LETTER.__getitem__, piece)) if known else None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Formats a conversation with the chat template.

        Args:
            messages: `{"role": ..., "content": ...}` in order.
            add_generation_prompt: whether to begin the assistant's turn.
            **variables: other variables of the template (`tools`, `enable_thinking`, ...).

        Raises:
            DataError: the checkpoint has no chat template, or it rejects these messages.
        """
        template = self.chat_template
        variables = self.template_variables | variables
        if isinstance(template, Mapping):
            wanted = "tool_use" if variables.get("tools") and "tool_use" in template else "default"
            template = template.get(wanted)
        if template is not None and not isinstance(template, str):
            raise DataError(f"a chat template must be a text, got {type(template).__name__}")
        if template is None:
            raise DataError(
                "this checkpoint has no chat template: write the prompt as plain text, or add a "
                "chat_template to tokenizer_config.json"
            )
        from dms_jax.checkpoint.chat import render_chat  # not at the top: jinja2 is slow to import

        variables = {"tools": None, "documents": None} | self.special_tokens | variables
        return render_chat(
            template,
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            **variables,
        )

    def with_shown(self, texts: Iterable[str]) -> "Tokenizer":
        """Returns a tokenizer whose `decode` does not skip these special tokens.

        For tokens that a parser needs, such as those that introduce a tool call.
        """
        added, wanted = self.backend.get_added_tokens_decoder().values(), set(texts)
        if not any(token.special and token.content in wanted for token in added):
            return self
        vocabulary = json.loads(self.backend.to_str())
        for token in vocabulary["added_tokens"]:
            token["special"] = token["special"] and token["content"] not in wanted
        backend = tokenizers.Tokenizer.from_str(json.dumps(vocabulary))
        backend.encode_special_tokens = self.backend.encode_special_tokens
        found = Tokenizer(
            backend,
            special_tokens=self.special_tokens,
            chat_template=self.chat_template,
            extra=self._extra,
        )
        found.template_variables = dict(self.template_variables)
        return found

    def save(self, directory: str | pathlib.Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json` into an existing directory.

        Raises:
            CheckpointError: the tokenizer cannot be serialized.
            OSError: the files cannot be written.
        """
        directory = pathlib.Path(directory)
        with library_errors(CheckpointError, "the tokenizer cannot be written as JSON"):
            vocabulary = self.backend.to_str(pretty=True)
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | self._extra | self.special_tokens
        config["clean_up_tokenization_spaces"] = False
        if isinstance(self.chat_template, Mapping):
            named = self.chat_template.items()
            config["chat_template"] = [{"name": n, "template": t} for n, t in named]
        elif self.chat_template is not None:
            config["chat_template"] = self.chat_template
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        for name, content in (("tokenizer.json", vocabulary), ("tokenizer_config.json", text)):
            (directory / name).write_text(content, encoding="utf-8")

    def _ending(self, found: tokenizers.Encoding) -> int:
        """The number of tokens that the post-processor added at the end of a text."""
        added = found.special_tokens_mask
        if 0 not in added and added:  # an empty text: its begin and end tokens are adjacent
            added = self.backend.encode("a").special_tokens_mask
        return len(added) if 0 not in added else added[::-1].index(0)

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


@contextlib.contextmanager
def library_errors(kind: type[DmsJaxError], what: str) -> Iterator[None]:
    """Converts the exceptions of the tokenizers library into one of our errors.

    The library raises plain `Exception`, and, if its Rust code panics, `PanicException`, which does
    not derive from it.
    """
    try:
        yield
    except DmsJaxError:
        raise
    except Exception as error:
        raise kind(f"{what}: {plain(error, 300)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: the tokenizers library failed: {plain(error, 300)}") from error


def _read_backend(directory: pathlib.Path) -> tokenizers.Tokenizer | None:
    """Reads tokenizer.json; None if the directory has no tokenizer.

    Raises:
        CheckpointError: the file is damaged, or the tokenizer has another layout.
    """
    content = read(directory, "tokenizer.json")
    if content is None:
        for name in OTHER_LAYOUTS:
            if find(directory, name) is not None:
                place = repr(str(directory))
                raise CheckpointError(
                    f"{directory} has {name} but no tokenizer.json. Write one with transformers 4 "
                    "(version 5 can split spaces at the start of a text differently): "
                    'python -c "from transformers import AutoTokenizer; '
                    f'AutoTokenizer.from_pretrained({place}).save_pretrained({place})"'
                )
        return None
    with library_errors(CheckpointError, "tokenizer.json cannot be read as a tokenizer"):
        backend = tokenizers.Tokenizer.from_buffer(content)
    # Before encoding anything: padding to 10^18 tokens would exhaust the memory.
    backend.no_padding()
    backend.no_truncation()
    return backend


def apply_sequence_ends(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Adds or removes the begin and end tokens as `add_bos_token` and `add_eos_token` ask.

    If neither is given, the post-processor of `tokenizer.json` is kept.
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


def _template_files(directory: pathlib.Path) -> list[str]:
    """The files of a directory that may hold chat templates, under transformers' names."""
    folder = directory / _MORE_TEMPLATES
    more = [file.name for file in folder.glob("*.jinja")] if folder.is_dir() else []
    return [_TEMPLATE, *(f"{_MORE_TEMPLATES}/{name}" for name in sorted(more)[:_MOST_TEMPLATES])]


def _chat_template(
    directory: pathlib.Path, config: Mapping[str, Any]
) -> str | dict[str, str] | None:
    named = {}
    for name in _template_files(directory):
        text = read_text(directory, name)
        if text is not None:
            stem = pathlib.PurePosixPath(name).stem
            named["default" if name == _TEMPLATE else stem] = text
    if named:
        return named["default"] if list(named) == ["default"] else named
    where, template = "tokenizer_config.json", config.get("chat_template")
    if template is None:
        where = "chat_template.json"
        beside = read_json(directory, where)
        template = (beside or {}).get("chat_template")
    if template is None:
        return None
    if isinstance(template, str):
        named = {"default": template}
    else:
        try:
            named = {entry["name"]: entry["template"] for entry in template}
        except (KeyError, TypeError):
            named = {}
    if not named or not all(isinstance(x, str) for x in (*named, *named.values())):
        raise CheckpointError(f"{where}: chat_template must be a text or a list of named texts")
    return template if isinstance(template, str) else named
