"""The scheduler: which sequences are in the cache, and what runs next.

A request waits, is admitted to a lane when the pool can hold its prompt, is prefilled in chunks,
and decodes in chunks until it ends. Before every chunk the pages it may need are reserved. When
they do not fit, the youngest running request goes back to the queue: its tokens are kept and its
past is recomputed later, prompt as prompt and answer as answer, so that no policy can tell.
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dms_jax.cache.accounting import Meter
from dms_jax.errors import CapacityError, ConfigError, DataError, DmsJaxError
from dms_jax.generation.memory import pool_pages
from dms_jax.generation.requests import Completion, OnTokens, Prompt, Request, TextTracker, Update
from dms_jax.generation.runner import Runner, Steps
from dms_jax.generation.sampling import Sampling
from dms_jax.model.language_model import LanguageModel, check_tokens
from dms_jax.policies import Policy


class Engine:
    """A model, a policy and a pool, ready to serve requests.

    Args:
      model: what to run.
      policy: the checkpoint's own if None.
      num_lanes: the most sequences in the cache at a time.
      memory: bytes for the pool; None for what the requests can need, within the free memory.
      max_tokens: the longest sequence expected, for sizing the pool; the model's positions if None.
      page_size: slots a page.
      chunk: decode steps per compiled program.
      prefill_chunk: prompt tokens per compiled program.

    Raises:
      ConfigError: an argument or the policy does not fit.
      CapacityError: the memory does not hold a single sequence's first chunk.
    """

    def __init__(
        self,
        model: LanguageModel,
        policy: Policy | None = None,
        *,
        num_lanes: int = 8,
        memory: int | None = None,
        max_tokens: int | None = None,
        page_size: int = 64,
        chunk: int = 32,
        prefill_chunk: int = 512,
    ):
        sizes = dict(
            num_lanes=num_lanes, page_size=page_size, chunk=chunk, prefill_chunk=prefill_chunk
        )
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"{name} must be at least 1, got {size}.")
        self.model, self.policy = model, model.resolve_policy(policy)
        self.chunk, self.prefill_chunk = chunk, prefill_chunk
        positions = model.config.max_position_embeddings
        self.runner = Runner(
            model,
            self.policy,
            num_lanes=num_lanes,
            num_pages=pool_pages(
                model,
                self.policy,
                num_lanes=num_lanes,
                max_tokens=min(max_tokens or positions, positions),
                page_size=page_size,
                memory=memory,
            ),
            page_size=page_size,
        )
        self._running: dict[int, Request] = {}  # lane -> request, oldest first
        self._keys = np.zeros((num_lanes, *jax.random.key_data(jax.random.key(0)).shape), np.uint32)
        self._newest = np.zeros(num_lanes, np.int32)

    # -- public -----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: Sampling | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Completion]:
        """Completes prompts; see `dms_jax.generate`."""
        sampling = sampling or Sampling()
        return self.serve(self._requests(prompts, sampling), sampling, on_tokens)

    def encode(self, prompt: Prompt, *, continuing: bool = False) -> list[int]:
        """Token ids of a prompt: text, chat messages, or ids as they are.

        Raises:
          DataError: empty, outside the vocabulary, beyond the positions, or text without a
            tokenizer.
        """
        tokenizer = self.model.tokenizer
        if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], dict)):
            if tokenizer is None:
                raise DataError("This model has no tokenizer: give prompts as lists of token ids.")
            if not isinstance(prompt, str):
                text = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True)
                tokens = tokenizer.encode(text, add_special_tokens=False)
            else:
                tokens = tokenizer.encode(prompt, add_special_tokens=not continuing)
        else:
            tokens = [int(token) for token in prompt]  # pyright: ignore
        if not tokens:
            raise DataError("A prompt must hold at least one token.")
        check_tokens(np.asarray(tokens), self.model.config)
        return list(tokens)

    # -- requests ---------------------------------------------------------------------------------

    def _requests(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Request]:
        if isinstance(prompts, str):
            raise DataError("Give a list of prompts, not a single string.")
        if not isinstance(sampling.seed, int) and len(sampling.seed) != len(prompts):
            raise ConfigError(
                f"Sampling: {len(sampling.seed)} seeds for {len(prompts)} prompts; give one, or "
                "one each."
            )
        copies: collections.Counter = collections.Counter()
        requests = []
        for index, prompt in enumerate(prompts):
            tokens = self.encode(prompt)
            seed = sampling.seed_of(index)
            copy = copies[seed, *tokens]
            requests.append(self.request(tokens, sampling, index=index, seed=seed, copy=copy))
            copies[seed, *tokens] += 1
        return requests

    def request(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        index: int = 0,
        seed: int = 0,
        copy: int = 0,
        before: Sequence[int] = (),
        seen: int = 0,
    ) -> Request:
        """Builds a request; `seen` tokens are in the cache already, then come those of `before`.

        Raises:
          DataError: no position is left for an answer.
        """
        config = self.model.config
        used = seen + len(before) + len(prompt)
        if used >= config.max_position_embeddings:
            raise DataError(
                f"Prompt {index} makes {used} tokens and leaves no room for an answer in the "
                f"model's {config.max_position_embeddings} positions."
            )
        return Request(
            index=index,
            prompt=prompt,
            seed=seed,
            copy=copy,
            max_new_tokens=min(sampling.max_new_tokens, config.max_position_embeddings - used),
            meter=Meter(rows=config.num_layers * config.num_kv_heads),
            before=list(before),
        )

    # -- the loop ---------------------------------------------------------------------------------

    def serve(
        self,
        requests: list[Request],
        sampling: Sampling,
        on_tokens: OnTokens | None = None,
        *,
        keep: bool = False,
    ) -> list[Completion]:
        """Runs requests to their end; `keep` leaves them in the cache (a conversation)."""
        tracker = TextTracker(
            self.model.tokenizer, sampling.stop_strings, self.model.generation.eos_token_ids
        )
        # A stop string is seen between chunks; a conversation must not cache tokens beyond it.
        num_steps = 1 if keep and sampling.stop_strings else self.chunk
        waiting = collections.deque(requests)
        self._running = {}
        try:
            while waiting or self._running:
                self._admit(waiting, sampling)
                self._report(tracker, on_tokens, keep=keep)
                if self._running:
                    self._decode_chunk(waiting, sampling, num_steps)
                    self._report(tracker, on_tokens, keep=keep)
        except BaseException:  # an interrupt too: a donated cache may be gone
            self.runner.restart()
            raise
        return [self._completion(request, sampling) for request in requests]

    def _admit(self, waiting: collections.deque[Request], sampling: Sampling) -> None:
        """Moves requests into free lanes and prefills them."""
        free = [lane for lane in range(len(self.runner.seen)) if lane not in self._running]
        todo: dict[int, list[int]] = {}
        answers: dict[int, list[int]] = {}
        extra = np.zeros(len(self.runner.seen), np.int64)
        extra[list(self._running)] = self.chunk
        while waiting and free:
            request = waiting[0]
            lane = free[0]
            extra[lane] = min(len(request.prompt), self.prefill_chunk) + self.chunk
            if not self.runner.fits(extra):
                extra[lane] = 0
                if not self._running and not todo:
                    raise CapacityError(
                        "The pool cannot hold the first chunk of a single sequence. Give it more "
                        "memory, a smaller chunk, or a smaller page size."
                    )
                break
            waiting.popleft()
            free.pop(0)
            self._running[lane] = request
            todo[lane] = request.before + request.prompt
            # A request that was put back recomputes its answer as an answer; the newest token
            # has never been in the cache.
            answers[lane] = request.generated[:-1]
        if not todo:
            return
        hidden = self._prefill(todo, waiting, prompt=True)
        if any(answers.values()):
            back = {lane: tokens for lane, tokens in answers.items() if tokens}
            hidden |= self._prefill(back, waiting, prompt=False)
        started = {lane: state for lane, state in hidden.items() if lane in self._running}
        new = {lane: state for lane, state in started.items() if not self._running[lane].generated}
        for lane in started:
            request = self._running[lane]
            key = jax.random.fold_in(jax.random.key(request.seed), request.copy)
            self._keys[lane] = jax.random.key_data(key)
        if new:
            tokens, logprobs = self.runner.first_tokens(new, self._keys, sampling.filter)
            for lane in new:
                self._running[lane].generated.append(tokens[lane])
                self._running[lane].logprobs.append(logprobs[lane])
                _check_finite(logprobs[lane])
        for lane in started:
            self._newest[lane] = self._running[lane].generated[-1]

    def _prefill(
        self, todo: dict[int, list[int]], waiting: collections.deque[Request], *, prompt: bool
    ) -> dict[int, jax.Array]:
        """Runs tokens of several lanes through the cache; returns the last hidden states."""
        width = min(self.prefill_chunk, _round_up(max(map(len, todo.values()))))
        hidden: dict[int, jax.Array] = {}
        live: dict[int, list[np.ndarray]] = collections.defaultdict(list)
        done = dict.fromkeys(todo, 0)
        while True:
            for lane in [lane for lane in done if lane not in self._running]:
                del done[lane]  # put back to make room
            parts = {
                lane: np.asarray(todo[lane][start : start + width], np.int32)
                for lane, start in done.items()
                if start < len(todo[lane])
            }
            if not parts:
                break
            extra = np.zeros(len(self.runner.seen), np.int64)
            for lane, part in parts.items():
                extra[lane] = len(part)
            if not self._make_room(extra, waiting):
                continue
            last, after = self.runner.extend(parts, width=width, prompt=prompt)
            for lane, part in parts.items():
                done[lane] += len(part)
                live[lane].append(after[lane])
                hidden[lane] = last[lane]
                self._running[lane].meter.peak_bytes = max(
                    self._running[lane].meter.peak_bytes, self.runner.cache_bytes(lane)
                )
            self.runner.trim()
        for lane in done:
            self._running[lane].meter.add(np.concatenate(live[lane]))
        return {lane: hidden[lane] for lane in done}

    def _make_room(self, extra: np.ndarray, waiting: collections.deque[Request]) -> bool:
        """Reserves pages, putting the youngest back until they fit; False if any was."""
        before = len(self._running)
        while not self.runner.fits(extra):
            self.runner.trim()
            if self.runner.fits(extra):
                break
            if len(self._running) <= 1:
                raise CapacityError(
                    "The pool cannot hold a single sequence to its end: "
                    f"{self.runner.allocator.pages_per_shard} pages of {self.runner.page_size} "
                    "tokens. Give it more memory, or generate fewer tokens."
                )
            youngest = next(reversed(self._running))
            waiting.appendleft(self._running.pop(youngest))
            self.runner.clear([youngest])
            extra[youngest] = 0
        self.runner.reserve(extra)
        return len(self._running) == before

    def _decode_chunk(
        self, waiting: collections.deque[Request], sampling: Sampling, num_steps: int
    ) -> None:
        extra = np.zeros(len(self.runner.seen), np.int64)
        for lane, request in self._running.items():
            extra[lane] = min(num_steps, request.remaining)
        self._make_room(extra, waiting)
        remaining = np.zeros(len(self.runner.seen), np.int32)
        for lane, request in self._running.items():
            remaining[lane] = request.remaining
            request.meter.peak_bytes = max(request.meter.peak_bytes, self.runner.cache_bytes(lane))
        steps = self.runner.decode(
            self._newest,
            remaining,
            self._keys,
            sampling.filter,
            num_steps=num_steps,
            end_tokens=self.model.generation.eos_token_ids,
        )
        for lane, request in self._running.items():
            self._take(request, lane, steps)

    def _take(self, request: Request, lane: int, steps: Steps) -> None:
        ran = steps.ran[:, lane]
        _check_finite(steps.logprobs[ran, lane])
        request.generated.extend(steps.tokens[ran, lane].tolist())
        request.logprobs.extend(steps.logprobs[ran, lane].tolist())
        request.live.extend(steps.live[ran, lane].tolist())
        request.reads.extend(steps.reads[ran, lane].tolist())
        self._newest[lane] = request.generated[-1]

    # -- results ----------------------------------------------------------------------------------

    def _report(self, tracker: TextTracker, on_tokens: OnTokens | None, *, keep: bool) -> None:
        """Updates texts, streams news, and lets finished requests go."""
        finished = []
        for lane, request in self._running.items():
            text = tracker.update(request)
            done = request.finish_reason is not None
            if done:
                finished.append(lane)
                self._settle(lane, request)
            news = request.generated[request.reported_tokens :]
            request.reported_tokens = len(request.generated)
            if on_tokens is not None and (news or text or done):
                on_tokens(Update(index=request.index, tokens=news, text=text, finished=done))
        for lane in finished:
            del self._running[lane]
        if finished and not keep:
            self.runner.clear(finished)
        self.runner.trim()

    def _settle(self, lane: int, request: Request) -> None:
        """Works out the usage; steps beyond a stop string do not count."""
        self.runner.trim()
        request.meter.add(request.live, request.reads)
        request.usage = request.meter.usage(
            prompt_tokens=len(request.before) + len(request.prompt),
            new_tokens=len(request.generated),
            seen=int(self.runner.seen[lane]),
            cache_bytes=self.runner.cache_bytes(lane),
        )

    def _completion(self, request: Request, sampling: Sampling) -> Completion:
        assert request.usage is not None
        assert request.finish_reason is not None
        return Completion(
            text=request.text,
            tokens=request.generated,
            logprobs=request.logprobs if sampling.logprobs else None,
            finish_reason=request.finish_reason,
            usage=request.usage,
        )


def _check_finite(logprobs: Any) -> None:
    if not np.isfinite(logprobs).all():
        raise DmsJaxError(
            "The model produced logits that are not numbers. Check the checkpoint's weights, or "
            "run in float32."
        )


def _round_up(size: int) -> int:
    """The next power of two, at least 8: few compiled shapes."""
    return max(8, 1 << max(size - 1, 0).bit_length())
