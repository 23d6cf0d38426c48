"""One optimizer step: teacher pass, student pass, gradients, AdamW.

The teacher is the original model with the vanilla cache; language modelling has no teacher. The
student runs the relaxed form of its policy's decisions on the same tokens, with logistic noise that
depends on the seed, the step and the sequence's place in the batch, and on no split of the batch;
with the vanilla cache there is nothing to relax. Gradients are summed over A passes of B sequences,
and each loss is already divided by the counts of the whole batch, so that accumulation equals one
large batch.

Only trained parameters have gradients and optimizer state. Parameters are kept in at least float32
and cast for the passes. On a mesh, `dms_jax.training.shards` says how the passes see them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from dms_jax.model.attention import Relaxation
from dms_jax.model.rope import segment_positions
from dms_jax.model.split_rows import Share, SplitRow, of_own_tokens
from dms_jax.policies import Policy, Vanilla
from dms_jax.training import compression, losses, supervision
from dms_jax.training.parameters import Parameters, Rebuild, decays, is_adapter
from dms_jax.training.recipe import DistillationPositions, Recipe
from dms_jax.training.shards import Shards

Metrics = dict[str, Array]


@struct.dataclass
class TrainState:
    """The state that a step changes.

    Attributes:
      step: number of steps taken, int32.
      parameters: the trained parameters.
      optimizer: the optimizer state of these parameters.
    """

    # The leaves are not always arrays: restoring a checkpoint needs a state of shapes.
    step: Any
    parameters: Any
    optimizer: Any


@struct.dataclass
class Constants:
    """Arrays that no step changes, in the dtype of the passes.

    Attributes:
      frozen: parameters of the student that are not trained.
      teacher: parameters of the teacher that are not among the student's frozen ones.
    """

    frozen: Parameters
    teacher: Parameters


@struct.dataclass
class Passes:
    """The sequences of an optimizer step: A passes of B sequences, or one pass without the A.

    Attributes:
      tokens: token ids.
      loss_mask: tokens that count in the loss, as targets of the position before them.
      segment_ids: number of each token's document within the sequence, 0 for padding; None for
        sequences that are not packed.
    """

    tokens: Int[Array, "*A B T"]
    loss_mask: Bool[Array, "*A B T"]
    segment_ids: Int[Array, "*A B T"] | None = None

    @property
    def counts(self) -> Bool[Array, "*A B T"]:
        """The tokens that count in the loss; padding never does."""
        if self.segment_ids is None:
            return self.loss_mask
        return self.loss_mask & (self.segment_ids > 0)

    @property
    def target_mask(self) -> Bool[Array, "*A B T"]:
        """The positions whose next token counts and belongs to the same document.

        # loss_mask  In: [0, 1, 1, 1], segment_ids [1, 1, 1, 2]  Out: [1, 1, 0, 0]
        """
        after = jnp.roll(self.counts, -1, axis=-1).at[..., -1].set(False)
        if self.segment_ids is None:
            return after
        return after & (self.segment_ids == jnp.roll(self.segment_ids, -1, axis=-1))

    def distillation_mask(self, positions: DistillationPositions) -> Bool[Array, "*A B T"]:
        """Returns the positions where student and teacher are compared; see `Recipe`."""
        return self.target_mask if positions == "targets" else self.counts


@struct.dataclass
class ScheduleValues:
    """The values of the schedules at one step, and the random key of the run.

    Attributes:
      target: share of tokens to evict.
      neuron_scale: scale of the borrowed neuron; None outside its decay.
      learning_rate: learning rate of all parameters except the adapter.
      adapter_learning_rate: learning rate of the adapter.
      key: key from which the noise of every step is drawn.
      supervised: in a stage "supervise", the share of keys that count as the least important; None
        outside of one.
    """

    target: Float[Array, ""]
    neuron_scale: Float[Array, ""] | None
    learning_rate: Float[Array, ""]
    adapter_learning_rate: Float[Array, ""]
    key: PRNGKeyArray
    supervised: Float[Array, ""] | None = None


def _decay_mask(arrays: Any) -> Any:
    return {name: decays(name) for name in arrays}


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Returns clipping and AdamW without the learning rate, which differs between parameters."""
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        optax.scale_by_adam(recipe.beta1, recipe.beta2, recipe.epsilon),
        optax.add_decayed_weights(recipe.weight_decay, mask=_decay_mask),
    )


def make_update(
    recipe: Recipe,
) -> Callable[[TrainState, Parameters, Array, ScheduleValues], tuple[TrainState, Array, Array]]:
    """Returns the update as a pure function of the state, the gradient, the loss and the schedule.

    It returns the next state, the norm of the gradient before clipping, and whether loss and
    gradient are finite: if not, parameters and moments stay.
    """
    optimizer = make_optimizer(recipe)

    def update(
        state: TrainState, gradient: Parameters, loss: Array, schedule: ScheduleValues
    ) -> tuple[TrainState, Array, Array]:
        norm = optax.tree.norm(gradient)
        updates: Any
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.parameters)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        # Weight decay would move what has no gradient.
        rest = schedule.learning_rate if schedule.supervised is None else 0.0
        arrays = {
            name: array
            - (schedule.adapter_learning_rate if is_adapter(name) else rest) * updates[name]
            for name, array in state.parameters.items()
        }
        kept = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (arrays, optimizer_state),
            (state.parameters, state.optimizer),
        )
        return TrainState(state.step + 1, *kept), norm, finite

    return update


def make_gradients(
    rebuild: Rebuild,
    policy: Policy,
    recipe: Recipe,
    *,
    rebuild_teacher: Rebuild | None = None,
    shards: Shards | None = None,
) -> Callable[[Parameters, Constants, Passes, ScheduleValues, Any], tuple[Parameters, Metrics]]:
    """Returns a pure function that computes the gradients and the losses of a batch.

    Its last argument is the random key of the noise; None for no noise. A teacher whose modules
    are not those of the student (it has no low-rank updates) has a `rebuild_teacher` of its own.
    `shards` says how the parameters are split over the mesh of the context; None for one device.
    """
    rebuild_teacher = rebuild if rebuild_teacher is None else rebuild_teacher
    shards = Shards({}) if shards is None else shards

    def pass_dtype(arrays: Parameters) -> Any:
        return jnp.dtype(recipe.compute_dtype or arrays["embedding"].dtype)

    def share(arrays: Parameters, together: bool, row: SplitRow | None = None) -> Share:
        """Returns what a device has of a pass; `together` it has all layers already."""
        if not shards.several or together:
            return Share(row=row)
        return Share(functools.partial(shards.gather_layer, dtype=pass_dtype(arrays)), row)

    def hidden_states(
        arrays: Parameters, rebuild, policy, sequences: Passes, share, **options: Any
    ):
        model = rebuild(arrays | {"embedding": arrays["embedding"].astype(pass_dtype(arrays))})
        return model(
            of_own_tokens(share.row, sequences.tokens),
            policy,
            segment_ids=sequences.segment_ids,
            unroll=recipe.unroll,
            share=share,
            **options,
        )

    def output_head(arrays: Parameters, hidden: Array, parameter: Parameters | None = None):
        """Returns what logits are made from; their gradient goes to `parameter`, if it is there."""
        name = "lm_head" if "lm_head" in arrays else "embedding"
        matrix = shards.whole(arrays, name, hidden.dtype)
        trained = (parameter or {}).get(name)
        if name == "lm_head":
            matrix, trained = matrix.T, None if trained is None else trained.T
        return losses.Head(hidden, matrix, trained)

    def supervised_loss(trained, frozen, sequences: Passes, schedule, rest):
        """The loss of a stage "supervise", in which only the adapter learns."""
        weights, together, _ = rest
        learned = policy.retrofit.supervision
        assert learned is not None
        trained = {x: y if is_adapter(x) else jax.lax.stop_gradient(y) for x, y in trained.items()}
        current = frozen | trained
        relaxation = Relaxation(supervised=True)
        result = hidden_states(
            current, rebuild, policy, sequences, share(current, together), relaxation=relaxation
        )
        assert result.supervision is not None
        distance = supervision.supervised_loss(learned, result.supervision, schedule.supervised)
        ids = sequences.segment_ids
        shares = compression.evicted_shares(result.decisions, None if ids is None else ids > 0)
        loss, zero = jnp.sum(distance) * weights[2], jnp.zeros_like(distance[0])
        return loss, {
            "loss": loss,
            "supervised_loss": loss,
            **dict.fromkeys(("distillation_loss", "lm_loss", "compression_loss"), zero),
            "evicted": jnp.sum(jnp.mean(shares, axis=(0, 2))) * weights[2],
        }

    def pass_loss(trained, frozen, own_teacher, sequences: Passes, schedule, keys, rest):
        if schedule.supervised is not None:
            return supervised_loss(trained, frozen, sequences, schedule, rest)
        weights, together, row = rest
        current = frozen | trained
        relaxation, own = None, share(current, together, row)
        if policy.retrofit.possible:
            relaxation = Relaxation(noise_keys=keys, neuron_scale=schedule.neuron_scale)
        result = hidden_states(
            current,
            rebuild,
            policy,
            sequences,
            own,
            relaxation=relaxation,
            remat="all_but_attention" if recipe.remat == "auto" else recipe.remat,
        )
        head = output_head(current, result.hidden, parameter=trained)
        teacher = None
        if recipe.loss == "distillation":
            original = jax.lax.stop_gradient(current | own_teacher)
            taught = hidden_states(original, rebuild_teacher, Vanilla(), sequences, own).hidden
            taught = jax.lax.stop_gradient(taught)
            teacher = losses.Head(taught, head.matrix)
            if own_teacher:
                teacher = output_head(original, taught)
        sums = losses.token_losses(
            head,
            teacher,
            targets=of_own_tokens(row, jnp.roll(sequences.tokens, -1, axis=-1)),
            mask=of_own_tokens(row, sequences.distillation_mask(recipe.distillation_positions)),
            target_mask=of_own_tokens(row, sequences.target_mask),
            direction=recipe.kl,
            temperature=recipe.distillation_temperature,
        )
        segment_ids = sequences.segment_ids
        shares = compression.evicted_shares(
            result.decisions, None if segment_ids is None else segment_ids > 0
        )
        distance = recipe.compression_weight * compression.compression_loss(
            shares, schedule.target, regulariser=recipe.regulariser, prior=recipe.prior
        )
        if recipe.layer_floor:
            distance += recipe.compression_weight * compression.floor_loss(
                shares, schedule.target, recipe.layer_floor
            )
        if recipe.head_balance:
            distance += recipe.head_balance * compression.head_spread(shares)
        per_position, per_target, per_sequence = weights
        if row is not None:  # every shard has the decisions of all tokens, and counts its part
            per_sequence /= row.shards
        parts = {
            "distillation_loss": sums.distillation * per_position,
            "lm_loss": sums.language_modeling * per_target,
            "compression_loss": jnp.sum(distance) * per_sequence,
            "evicted": jnp.sum(jnp.mean(shares, axis=(0, 2))) * per_sequence,
        }
        main = "distillation_loss" if recipe.loss == "distillation" else "lm_loss"
        loss = parts[main] + parts["compression_loss"]
        return loss, {"loss": loss, **parts}

    def of_shard(trained, frozen, teacher, passes: Passes, places, rest, shard):
        """Returns the sums over all passes of one shard's sequences, or of its tokens of them."""
        schedule, key, weights = rest
        row = None
        if shard is not None:
            row = SplitRow(shard, shards.of_a_row, passes.tokens.shape[-1])
        together = shards.whole_layers and len(places) > 1
        dtype = pass_dtype(frozen | trained)
        whole = [trained, frozen, teacher]
        if together:
            whole = [shards.gather_layers(arrays, dtype) for arrays in whole]

        def one_pass(sequences, places):
            fold = jax.vmap(functools.partial(jax.random.fold_in, key))
            keys = None if key is None else fold(places)
            (_, parts), gradient = jax.value_and_grad(pass_loss, has_aux=True)(
                *whole, sequences, schedule, keys, (weights, together, row)
            )
            return jax.tree.map(lambda x, like: x.astype(like.dtype), gradient, trained), parts

        def take(index) -> tuple[Passes, Array]:
            return jax.tree.map(lambda x: x[index], (passes, places))

        if len(places) == 1:
            return one_pass(*take(0))
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one_pass, *take(0))
        )

        def add(total, index):
            return jax.tree.map(jnp.add, total, one_pass(*take(index))), None

        (gradient, parts), _ = jax.lax.scan(add, zeros, jnp.arange(len(places)))
        return (shards.scatter_layers(gradient) if together else gradient), parts

    def gradients(trained, constants, passes: Passes, schedule, key):
        num_passes, num_sequences, _ = passes.tokens.shape
        wide = jnp.promote_types(jax.tree.leaves(trained)[0].dtype, jnp.float32)
        compared = passes.distillation_mask(recipe.distillation_positions)
        weights = (
            1 / jnp.maximum(compared.sum(), 1).astype(wide),
            1 / jnp.maximum(passes.target_mask.sum(), 1).astype(wide),
            jnp.asarray(1 / (num_passes * num_sequences), wide),
        )
        places = jnp.arange(num_passes * num_sequences).reshape(num_passes, num_sequences)
        return shards.map(of_shard)(
            trained, constants.frozen, constants.teacher, passes, places, (schedule, key, weights)
        )

    return gradients


def visible_keys(passes: Passes) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the mean number of keys that a document token sees, and the share of such tokens.

    # segment_ids  In: [1, 1, 1, 2, 2, 0]  Out: (1 + 2 + 3 + 1 + 2) / 5, 5 / 6
    """
    tokens = passes.tokens.reshape(-1, passes.tokens.shape[-1])
    ids = None if passes.segment_ids is None else passes.segment_ids.reshape(tokens.shape)
    valid = jnp.ones(tokens.shape, bool) if ids is None else ids > 0
    count = jnp.sum(valid, dtype=jnp.float32)
    keys = jnp.sum(jnp.where(valid, segment_positions(tokens, ids) + 1, 0), dtype=jnp.float32)
    return keys / jnp.maximum(count, 1), count / tokens.size


def make_step(
    rebuild: Rebuild,
    policy: Policy,
    recipe: Recipe,
    *,
    rebuild_teacher: Rebuild | None = None,
    shards: Shards | None = None,
) -> Callable[[TrainState, Constants, Passes, ScheduleValues], tuple[TrainState, Metrics]]:
    """Returns the step as a pure function, to be jitted with the state donated.

    Its metrics are scalars: `loss` and its parts (`distillation_loss`, `compression_loss`,
    `lm_loss`, and `supervised_loss` in a stage "supervise"), `evicted` (share of hard decisions to
    evict), `grad_norm` (before clipping), `visible_keys` (mean number of keys that a token sees),
    `document_share` (share of the tokens that are not padding) and `skipped` (the loss or the
    gradient is not finite, so that the step changed neither parameters nor moments).
    """
    update = make_update(recipe)
    gradients = make_gradients(
        rebuild, policy, recipe, rebuild_teacher=rebuild_teacher, shards=shards
    )

    def step(
        state: TrainState, constants: Constants, passes: Passes, schedule: ScheduleValues
    ) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(schedule.key, state.step)
        gradient, metrics = gradients(state.parameters, constants, passes, schedule, key)
        metrics["visible_keys"], metrics["document_share"] = visible_keys(passes)
        state, metrics["grad_norm"], finite = update(state, gradient, metrics["loss"], schedule)
        metrics["skipped"] = ~finite
        return state, metrics

    return step
