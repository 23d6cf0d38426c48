"""The model that lm-evaluation-harness calls: likelihoods and answers from the real paged cache.

Imported by the harness (see `harness.py`), so lm-eval is installed.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
)

from dms_jax import policies
from dms_jax.checkpoint import load
from dms_jax.errors import ConfigError, DataError
from dms_jax.evaluation.harness_requests import open_turn, read_sampling
from dms_jax.evaluation.likelihood import encode_pair, encode_text, first_token, likelihoods
from dms_jax.evaluation.perplexity import score_tokens
from dms_jax.evaluation.serving import Serving
from dms_jax.generation import Sampling
from dms_jax.model.language_model import LanguageModel

_LANES = 64


class HarnessModel(LM):
    """A checkpoint under a cache policy.

    Args:
      path: a Hugging Face directory, or a hub id; from Python also a loaded model.
      policy: the policy's name; the one that the checkpoint declares if None.
      adapter: directory of an adapter that was trained on the checkpoint.
      dtype: type of the weights and the cache; the type in the files if None.
      enable_thinking: variable of the chat template, if it has one.
      chat_variables: other variables of the chat template; only from Python.
      batch_size: the harness's option; above 1 it is the number of lanes (default 64). The
        harness's `--device` is ignored: jax chooses the device (JAX_PLATFORMS).
      **options: fields of `Serving` (lanes, memory, page_size, ...), and options of the policy
        (budget=512, window=256).

    Raises:
      ConfigError: the policy or an option does not fit.
      CheckpointError: the checkpoint cannot be read.
    """

    def __init__(
        self,
        path: str | LanguageModel,
        *,
        policy: str | None = None,
        adapter: str | None = None,
        dtype: str | None = None,
        enable_thinking: bool | None = None,
        chat_variables: Mapping[str, Any] | None = None,
        batch_size: int | str | None = None,
        **options: Any,
    ):
        super().__init__()
        for name in ("max_batch_size", "device"):
            options.pop(name, None)
        fields = [field.name for field in dataclasses.fields(Serving)]
        asked = str(batch_size)
        lanes = int(asked) if asked.isdecimal() and int(asked) > 1 else _LANES
        serving: dict[str, Any] = {"lanes": lanes}
        serving |= {name: options.pop(name) for name in fields if name in options}
        self.serving = Serving(**serving)
        if policy is None and options:
            raise ConfigError(
                f"{', '.join(sorted(options))}: these are not options of the model; if they are a "
                "policy's, name it with policy=."
            )
        loaded = isinstance(path, LanguageModel)
        self.model = path if loaded else load(str(path), dtype=dtype, adapter=adapter)
        self._path = "model" if loaded else str(path)
        if self.model.tokenizer is None:
            raise DataError(f"{self._path} has no tokenizer, and the harness asks in text.")
        chosen = None if policy is None else policies.from_dict({**options, "name": policy})
        self.policy = self.model.resolve_policy(chosen)
        self._chat_variables = dict(chat_variables or {})
        if enable_thinking is not None:
            self._chat_variables["enable_thinking"] = enable_thinking
        self._peaks: list[float] = []

    # -- requests ---------------------------------------------------------------------------------

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether it is the greedy one."""
        del disable_tqdm
        pairs = [self._truncate_context(*encode_pair(self.model, *each.args)) for each in requests]
        found = likelihoods(self.model, pairs, policy=self.policy, serving=self.serving)
        self._peaks += [each.peak_tokens for each in found]
        answers = [(each.logprob, each.greedy) for each in found]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of each text, in the longest windows that fit the positions."""
        del disable_tqdm
        start = first_token(self.model)
        most = self.max_length - 1  # a window includes the token before it
        windows: list[list[int]] = []
        sizes: list[list[int]] = []  # tokens that each window of each text predicts
        for request in requests:
            tokens = self.model.tokenizer.encode(request.args[0], add_special_tokens=False)
            pairs = [
                make_disjoint_window(pair)
                for pair in get_rolling_token_windows(tokens, start, most, 1)
            ]
            windows += [[*before, *after] for before, after in pairs]
            sizes.append([len(after) for _, after in pairs])
        scores = score_tokens(self.model, windows, self.policy, self.serving) if windows else []
        self._peaks += [each.usage.peak_tokens for each in scores]
        found = iter(scores)
        answers = [
            float(sum(np.sum(next(found).logprobs[-size:], dtype=np.float64) for size in own))
            for own in sizes
        ]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The model's answer to each context, up to a stop string."""
        del disable_tqdm
        groups: dict[Sampling, list[int]] = collections.defaultdict(list)
        for index, request in enumerate(requests):
            groups[read_sampling(request.args[1])].append(index)
        answers = [""] * len(requests)
        for sampling, indices in groups.items():
            room = self.max_length - sampling.max_new_tokens
            if room < 1:
                raise ConfigError(
                    f"A task asks for answers of {sampling.max_new_tokens} tokens, and the model "
                    f"has {self.max_length} positions: give --gen_kwargs max_gen_toks=."
                )
            contexts = [encode_text(self.model, requests[i].args[0])[-room:] for i in indices]
            engine = self.serving.engine(
                self.model,
                self.policy,
                sequences=len(contexts),
                max_tokens=max(map(len, contexts)) + sampling.max_new_tokens,
            )
            for index, done in zip(
                indices, engine.generate(contexts, sampling=sampling), strict=True
            ):
                answers[index] = done.text
                self._peaks.append(done.usage.peak_tokens)
                self.cache_hook.add_partial("generate_until", requests[index].args, done.text)
        return answers

    def _truncate_context(
        self, context: Sequence[int], continuation: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Truncates the context on the left so that both fit the model's positions."""
        room = self.max_length - len(continuation)
        return context[-max(room, 1) :], continuation

    # -- what the harness asks about --------------------------------------------------------------

    @property
    def max_length(self) -> int:
        """The longest context in tokens: all positions of the model."""
        return self.model.config.max_position_embeddings

    @property
    def tokenizer_name(self) -> str:
        """The path of the checkpoint; the harness uses it as a key of its request cache."""
        return self._path.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The source of the chat template; empty if it is not requested."""
        template = self.model.tokenizer.chat_template if chat_template else None
        if isinstance(template, Mapping):
            template = template.get(chat_template if isinstance(chat_template, str) else "default")
        return template or ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Renders a conversation; without a generation prompt the last message stays open."""
        if not add_generation_prompt:
            return open_turn(self.model.tokenizer, chat_history, **self._chat_variables)
        return self.model.tokenizer.apply_chat_template(chat_history, **self._chat_variables)

    def get_model_info(self) -> dict[str, Any]:
        """Data stored with the results: the policy, cache options, and mean peak of live tokens."""
        peak = float(np.mean(self._peaks)) if self._peaks else None
        return {
            "policy": self.policy.to_dict(),
            "serving": self.serving.to_dict(),
            "peak_tokens": peak,
        }
