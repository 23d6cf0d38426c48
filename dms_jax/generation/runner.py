"""The device side of generation: a cache with its page table, and the compiled chunks over it.

No work on the host scales with the number of tokens: pages are reserved before each chunk, a chunk
of C decode steps is one compiled program, and only its tokens and the rows' lengths are copied
back. A chunk is launched, and read later: more may be launched before that (`rows.py`).
"""

from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int, UInt32

from dms_jax import sharding
from dms_jax.cache import PageAllocator
from dms_jax.cache.host_values import HostRows, HostValues
from dms_jax.cache.pages import few_sizes, few_widths
from dms_jax.devices import fits_device
from dms_jax.errors import ConfigError
from dms_jax.generation import programs
from dms_jax.generation.batches import Extended, LaunchedSteps, build_batch
from dms_jax.generation.calls import Working
from dms_jax.generation.programs import Steps
from dms_jax.generation.rows import Rows, UnreadPrompts
from dms_jax.generation.sampling import Filter
from dms_jax.generation.shapes import PromptShapes, Shape, cuts_prompts, prompt_shapes
from dms_jax.model.caching import layer_page_bytes, page_bytes, state_bytes
from dms_jax.model.language_model import LanguageModel, use_mesh
from dms_jax.policies import Policy


class Runner(Rows):
    """A cache of B lanes (one sequence each) and the programs that run over it.

    Attributes:
      traced_policy: the policy with its numbers on the device, which programs take.
      seen: Int[B] on the host, the number of tokens that each lane has processed.
      num_shards: number of devices with pages of their own.
      page_bytes: bytes of a page, keys, values and what a policy keeps with them.
      data_shards: number of parts of the lanes, each with pages on devices of its own.
      hidden: [B, E] on the device, the hidden state of the last token that each lane has read.
      max_tokens: length of the sequences that the cache is made for; longer ones may fit too.
      dirty: whether there is no cache, or failed work may have left it inconsistent; see `working`.
    """

    def __init__(
        self,
        model: LanguageModel,
        policy: Policy,
        *,
        num_lanes: int,
        num_pages: int,
        page_size: int,
        max_tokens: int | None = None,
        table_width: int | None = None,
        kv_dtype: str | None = None,
    ):
        self.model, self.policy, self.page_size = model, policy, page_size
        self.traced_policy = jax.tree.map(self.everywhere, jax.device_put(policy))
        self._kv_dtype, self._table_width = kv_dtype, table_width
        positions = model.config.max_position_embeddings
        self.max_tokens = max_tokens or positions
        whole = policy.footprint(positions, page_size=page_size)
        self._keeps_all = whole.at_least >= positions
        self._max_length = 0  # tokens of the longest sequence so far
        self._expected_slots = 1
        self.raise_max_length(1)
        self._shape = (num_lanes, num_pages)
        self.cache: Any = None
        self.hidden: Any = None
        config = model.config
        self.page_bytes = page_bytes(config, policy, page_size, model.dtype, kv_dtype)
        self._layer_bytes = layer_page_bytes(config, policy, page_size, model.dtype, kv_dtype)
        groups = policy.groups(config.num_layers)
        self._value_layers = next(
            (group.start for group in groups if group.host_values), config.num_layers
        )
        if not all(group.host_values for group in groups if group.start >= self._value_layers):
            raise ConfigError(
                f"{policy.name}: values in host memory are those of the last layers, and its "
                "groups put a layer with values on the device behind one with values on the host."
            )
        with use_mesh(model.mesh):
            on_mesh = sharding.has_mesh()
        if self._value_layers < config.num_layers and on_mesh:
            raise ConfigError(
                f"{policy.name}: values in host memory are served on one device, not on a mesh; "
                "give the policy values='device', or load the model without a mesh."
            )
        self.host: HostValues | None = None
        self._state_bytes = state_bytes(config, policy, model.dtype)
        self.restart()

    def working(self) -> Working:
        """A context in which programs run. If one fails, the cache is gone and its memory free.

        `dirty` is set from before the first program until after the last, and as long as there is
        no cache: whatever runs next makes a new one first. What fails because the device has too
        little memory raises OutOfMemoryError.
        """
        return Working(self)

    def recover(self) -> None:
        """Makes a new cache if there is none, or failed work may have left it inconsistent."""
        if self.dirty:
            self.restart()

    def restart(self) -> None:
        """Replaces the cache by an empty one."""
        self.release()  # first: memory may not hold two
        config, num_pages = self.model.config, self.allocator.pages_per_shard * self.num_shards
        value_pages = self._shape[1] * self._value_layers // config.num_layers
        on_host = self._value_layers < config.num_layers
        with use_mesh(self.model.mesh):
            make = programs.make_cache(
                config,
                jax.tree.structure(self.policy),
                len(self.seen),
                num_pages,
                self.page_size,
                self.model.dtype,
                self._kv_dtype,
                value_pages if on_host else None,
                self.model.mesh,
            )
            with fits_device(
                f"The device has no room for a cache of {num_pages} pages "
                f"({num_pages * self.page_bytes:,} bytes). Give it less (memory=)."
            ):
                # Else what does not fit is found by the first program that uses it.
                self.cache = jax.block_until_ready(make())
        if on_host:
            self.host = HostValues(
                first_page=value_pages,
                num_pages=self._shape[1] - value_pages,
                page_size=self.page_size,
                head_dim=self.cache.k_pages.shape[-1],
                dtype=self.cache.k_pages.dtype,
            )
        self.hidden = self.everywhere(
            np.zeros((len(self.seen), config.hidden_size), self.model.dtype)
        )
        self.dirty = False

    def release(self) -> None:
        """Frees the memory of the cache; `recover` makes another one."""
        self.dirty = True
        if self.cache is not None:
            for leaf in jax.tree.leaves(self.cache):
                leaf.delete()
            self.cache = self.hidden = None
        if self.host is not None:
            self.host.delete()
            self.host = None
        num_lanes, num_pages = self._shape
        config = self.model.config
        with use_mesh(self.model.mesh):
            data, heads = sharding.row_axes(num_lanes, config.num_kv_heads)
            self.data_shards = sharding.axis_size(data) if data else 1
            # A subset of the lanes could be sharded over other devices than those with its pages.
            self.fixed_lanes = sharding.axis_size(sharding.DATA) > 1
            head_shards = sharding.axis_size(heads) if heads else 1
        self.num_shards = self.data_shards * head_shards
        on_host = self._value_layers < config.num_layers
        value_pages = num_pages * self._value_layers // config.num_layers
        self.allocator = PageAllocator(
            num_layers=config.num_layers,
            num_sequences=num_lanes,
            num_kv_heads=config.num_kv_heads,
            pages_per_shard=num_pages // self.num_shards,
            page_size=self.page_size,
            sequence_shards=self.data_shards,
            head_shards=head_shards,
            first=(self._value_layers, value_pages) if on_host else (0, 0),
        )
        self._prompts = None
        self.lengths = np.zeros((config.num_layers, num_lanes, config.num_kv_heads), np.int64)
        self.seen = np.zeros(num_lanes, np.int64)
        self.unread = np.zeros(num_lanes, np.int64)
        self.forgotten = np.zeros(num_lanes, np.int64)
        self._max_lengths = np.zeros(num_lanes, np.int32)

    def clear(self, lanes: list[int]) -> None:
        """Empties lanes and releases their pages."""
        self.forget(lanes)
        self.allocator.release(np.asarray(lanes, np.int64))
        self.seen[lanes] = 0
        mask = np.zeros(len(self.seen), bool)
        mask[lanes] = True
        with use_mesh(self.model.mesh):
            self.cache = programs.clear(
                self.cache, mask, self.model.config, self.traced_policy, self.model.dtype
            )

    def set_max_lengths(self, tokens: dict[int, int]) -> None:
        """Sets the maximum length of lanes, from which a compression ratio's budget follows."""
        self.raise_max_length(max(tokens.values()))
        if self.policy.for_length(1) is self.policy:
            return
        self._max_lengths[list(tokens)] = list(tokens.values())
        with use_mesh(self.model.mesh):
            self.cache = programs.set_max_lengths(self.cache, self._max_lengths.copy())

    def everywhere(self, x: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        """Returns what a program gave or the host has as every device of a mesh has it.

        A program is compiled once more for an argument that lies elsewhere.
        """
        if self.model.mesh is None:
            return x
        return jax.device_put(x, NamedSharding(self.model.mesh, PartitionSpec()))

    def prompt_shapes(self, chunk: int, tokens: int) -> PromptShapes:
        """Returns the shapes for prompts in chunks of at most `chunk` of a program's `tokens`."""
        return prompt_shapes(
            self.model,
            self.policy,
            num_lanes=len(self.seen),
            fixed_lanes=self.fixed_lanes,
            chunk=chunk,
            tokens=tokens,
        )

    # -- running ----------------------------------------------------------------------------------

    def extend(
        self,
        tokens: dict[int, np.ndarray],
        *,
        shape: Shape,
        prompt: bool,
        ends_prompt: Collection[int] = (),
    ) -> Extended:
        """Launches the next tokens of some lanes through the cache (pages must be reserved).

        Args:
          tokens: lane -> up to T token ids.
          shape: shape of the compiled chunk.
          prompt: whether the tokens belong to a prompt.
          ends_prompt: lanes whose prompt the tokens complete.
        """
        num_lanes = len(self.seen)
        # Where no prompt ends, no layer waits to be told that it is left uncut.
        cuts = cuts_prompts(self.policy, shape) and bool(ends_prompt)
        batch = build_batch(
            tokens,
            num_lanes=num_lanes,
            shape=shape,
            fixed_lanes=self.fixed_lanes,
            ends_prompt=ends_prompt,
        )
        table = self._table(steps=False)
        rows = None if self.fixed_lanes else batch.lanes
        # A copy: the allocator changes its own while the program runs.
        table = table[:, np.minimum(batch.lanes, num_lanes - 1)]
        table[:, batch.lanes == num_lanes] = self.allocator.no_page
        with use_mesh(self.model.mesh):
            self.cache, extension, tail = programs.extend(
                self.model.transformer,
                self.cache,
                self.host_rows,
                table,
                rows,
                batch.tokens,
                batch.counts,
                batch.ends if cuts else None,
                self.traced_policy,
                shape.one_pass,
                shape.places,
            )
            own = np.where(batch.counts > 0, batch.lanes, num_lanes)
            self.hidden = programs.keep_hidden(self.hidden, extension.hidden, own)
        counts, ends = np.zeros(num_lanes, np.int64), np.zeros(num_lanes, bool)
        counts[batch.lanes[batch.counts > 0]] = batch.counts[batch.counts > 0]
        ends[list(ends_prompt)] = True
        if self.host is not None:
            assert tail is not None
            self.host.write(tail, table)
        self.seen = self.seen + counts
        if self._keeps_all:
            self.lengths = self.lengths + counts[:, None]
        else:
            self.read_prompts()  # those before it, while it runs
            self.allocator.trim(self.slots_after(counts, prompt=prompt))
            self._prompts = UnreadPrompts(extension.lengths, counts, ends)
        return Extended(
            hidden=extension.hidden,
            lanes=batch.lanes,
            counts=batch.counts,
            before=extension.before,
            totals=extension.live,
            rows=self.model.config.num_layers * self.model.config.num_kv_heads * shape.one_pass,
            lengths=extension.lengths if self.policy.shrinks else None,
        )

    def decode(
        self,
        tokens: Int[np.ndarray | jax.Array, " B"],
        remaining: Int[np.ndarray, " B"],
        seeds: UInt32[np.ndarray, "B 2"],
        rule: Filter,
        *,
        num_steps: int,
        end_tokens: tuple[int, ...],
    ) -> LaunchedSteps:
        """Launches C decode steps in one program (pages must be reserved); see `read`.

        Args:
          tokens: each lane's newest token (int32), not in the cache yet. A lane whose newest token
            is an end token is idle.
          remaining: number of tokens that each lane may still generate; 0 for an idle lane.
          seeds: see `programs.request_keys`.
          rule: sampling settings.
          num_steps: number of steps (C).
          end_tokens: token ids that end an answer.
        """
        table = self._table(steps=True).copy()  # pages are released while it runs
        with use_mesh(self.model.mesh):
            self.cache, steps, newest, tail = programs.decode(
                self.model.transformer,
                self.cache,
                self.host_rows,
                table,
                self.everywhere(tokens),
                remaining.astype(np.int32),
                seeds,
                self.traced_policy,
                rule,
                num_steps,
                end_tokens,
            )
        most = np.minimum(remaining, num_steps).astype(np.int64)
        self.unread = self.unread + most
        return LaunchedSteps(steps, newest, most, end_tokens, tail, table, self.forgotten)

    def read(self, launched: LaunchedSteps) -> Steps:
        """Waits for the oldest chunk that was not read; returns its steps but of cleared lanes."""
        steps = launched.steps.read()
        kept = launched.forgotten == self.forgotten
        steps = steps.replace(ran=steps.ran & kept)
        counts = steps.ran.sum(0)
        # Lanes that ended are idle in what was launched since. One that had no steps was idle, with
        # the end token of its last answer perhaps, and may have been taken since.
        ended = np.isin(steps.tokens[-1], launched.end_tokens) & (launched.most > 0)
        unread = np.where(ended, 0, self.unread - launched.most)
        self.unread = np.where(kept, unread, self.unread)
        self.read_lengths(steps.lengths, counts > 0)
        self.seen = self.seen + counts
        if self.host is not None:
            assert launched.tail is not None
            self.host.write(launched.tail, launched.table)
        return steps

    def teacher_forced_decode(
        self, tokens: Int[np.ndarray, "n B"], counts: Int[np.ndarray, " B"]
    ) -> Steps:
        """Runs C = n - 1 decode steps over given tokens (pages must be reserved).

        Of the result `logprobs[c]` is the log-probability of the given `tokens[c + 1]`, `tokens[c]`
        the likeliest token in its place. Lane b takes its first `counts[b]` steps.
        """
        table = self._table(steps=True)
        with use_mesh(self.model.mesh):
            self.cache, steps, tail = programs.teacher_forced_decode(
                self.model.transformer,
                self.cache,
                self.host_rows,
                table,
                tokens.astype(np.int32),
                counts.astype(np.int32),
                self.traced_policy,
            )
        self.unread = self.unread + counts
        return self.read(LaunchedSteps(steps, tokens[-1], counts, (), tail, table, self.forgotten))

    def expect(self, tokens: int) -> None:
        """Makes page tables wide enough for a sequence of so many tokens before it grows to it.

        Each width is a program to compile: those for the first tokens of long prompts, and for the
        first steps, have no other one than those for the last.
        """
        limit = None if self.policy.shrinks else self._slot_limit
        slots = tokens if limit is None else min(tokens, limit)
        self._expected_slots = max(self._expected_slots, slots)

    def table_width(self, slots: int, *, steps: bool = False) -> int:
        """Returns the pages of a row in the compiled page table if the longest row has `slots`.

        Steps run behind the cut of their prompts: what a policy cuts rows to is all they need, and
        what a step keeps of every slot of a table (scores, the rows to be cut) is that much less.
        """
        expected = self._expected_slots
        if steps and self._slot_limit is not None:
            expected = min(expected, self._slot_limit)
        widest = -(-max(slots, expected) // self.page_size)
        if self._table_width is not None:
            return max(self._table_width, widest)
        limit = None if self.policy.shrinks else self._slot_limit
        most = self.max_tokens if limit is None else min(limit, self.max_tokens)
        return few_widths(widest, few_sizes(-(-most // self.page_size)))

    def table_widths(self, *, steps: bool = False) -> list[int]:
        """Returns every `table_width` of sequences that are no longer than planned."""
        if self._table_width is not None:
            return [self.table_width(1, steps=steps)]
        cut = self._slot_limit if steps or not self.policy.shrinks else None
        most = self.max_tokens if cut is None else min(cut, self.max_tokens)
        slots = range(1, most + self.page_size, self.page_size)
        return sorted({self.table_width(each, steps=steps) for each in slots})

    def _table(self, *, steps: bool) -> np.ndarray:
        slots = int(self.allocator.reserved.max(initial=1)) * self.page_size
        return self.allocator.table_of_width(self.table_width(slots, steps=steps))

    @property
    def host_rows(self) -> HostRows | None:
        """The values in host memory as programs see them."""
        return None if self.host is None else self.host.rows
