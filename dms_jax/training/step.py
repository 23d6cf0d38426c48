"""One optimizer step: teacher pass, student pass, gradients, AdamW.

The teacher is the original model with the vanilla cache; language modelling has no teacher. The
student runs the relaxed form of its policy's decisions on the same tokens, with logistic noise that
depends on the seed, the step and the pass; with the vanilla cache there is nothing to relax.
Gradients are summed over A passes of B sequences, and each loss is already divided by the counts of
the whole batch, so that accumulation equals one large batch.

Only trained parameters have gradients and optimizer state. Parameters are kept in at least float32
and cast for the passes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from dms_jax.model.attention import Relaxation
from dms_jax.model.transformer import segment_positions
from dms_jax.policies import Policy, Vanilla
from dms_jax.training import compression, losses, supervision
from dms_jax.training.parameters import Parameters, Rebuild, cast, decays, is_adapter
from dms_jax.training.recipe import DistillationPositions, Recipe

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


def make_gradients(
    rebuild: Rebuild, policy: Policy, recipe: Recipe, *, rebuild_teacher: Rebuild | None = None
) -> Callable[[Parameters, Constants, Passes, ScheduleValues, Any], tuple[Parameters, Metrics]]:
    """Returns a pure function that computes the gradients and the losses of a batch.

    Its last argument is the random key of the noise; None for no noise. A teacher whose modules
    are not those of the student (it has no low-rank updates) has a `rebuild_teacher` of its own.
    """
    rebuild_teacher = rebuild if rebuild_teacher is None else rebuild_teacher

    def supervised_loss(trained, constants: Constants, sequences: Passes, schedule, weights):
        """The loss of a stage "supervise", in which only the adapter learns."""
        learned = policy.retrofit.supervision
        assert learned is not None
        trained = {x: y if is_adapter(x) else jax.lax.stop_gradient(y) for x, y in trained.items()}
        result = rebuild(constants.frozen | cast(trained, recipe.compute_dtype))(
            sequences.tokens,
            policy,
            segment_ids=sequences.segment_ids,
            relaxation=Relaxation(supervised=True),
            unroll=recipe.unroll,
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

    def pass_loss(trained, constants: Constants, sequences: Passes, schedule, key, weights):
        if schedule.supervised is not None:
            return supervised_loss(trained, constants, sequences, schedule, weights)
        tokens, segment_ids = sequences.tokens, sequences.segment_ids
        current = constants.frozen | cast(trained, recipe.compute_dtype)
        student = rebuild(current)
        relaxation = None
        if policy.retrofit.possible:
            relaxation = Relaxation(noise_key=key, neuron_scale=schedule.neuron_scale)
        result = student(
            tokens,
            policy,
            segment_ids=segment_ids,
            relaxation=relaxation,
            remat=recipe.remat,
            unroll=recipe.unroll,
        )
        teacher = None
        if recipe.loss == "distillation":
            original = rebuild_teacher(jax.lax.stop_gradient(current | constants.teacher))
            hidden = original(
                tokens, Vanilla(), segment_ids=segment_ids, unroll=recipe.unroll
            ).hidden
            teacher = (jax.lax.stop_gradient(hidden), original.unembed)
        sums = losses.token_losses(
            (result.hidden, student.unembed),
            teacher,
            targets=jnp.roll(tokens, -1, axis=-1),
            mask=sequences.distillation_mask(recipe.distillation_positions),
            target_mask=sequences.target_mask,
            direction=recipe.kl,
        )
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
        parts = {
            "distillation_loss": sums.distillation * per_position,
            "lm_loss": sums.language_modeling * per_target,
            "compression_loss": jnp.sum(distance) * per_sequence,
            "evicted": jnp.sum(jnp.mean(shares, axis=(0, 2))) * per_sequence,
        }
        main = "distillation_loss" if recipe.loss == "distillation" else "lm_loss"
        loss = parts[main] + parts["compression_loss"]
        return loss, {"loss": loss, **parts}

    def gradients(trained, constants, passes: Passes, schedule, key):
        num_passes, num_sequences, _ = passes.tokens.shape

        def one_pass(sequences, index):
            own_key = None if key is None else jax.random.fold_in(key, index)
            (_, parts), gradient = jax.value_and_grad(pass_loss, has_aux=True)(
                trained, constants, sequences, schedule, own_key, weights
            )
            return gradient, parts

        wide = jnp.promote_types(jax.tree.leaves(trained)[0].dtype, jnp.float32)
        compared = passes.distillation_mask(recipe.distillation_positions)
        weights = (
            1 / jnp.maximum(compared.sum(), 1).astype(wide),
            1 / jnp.maximum(passes.target_mask.sum(), 1).astype(wide),
            jnp.asarray(1 / (num_passes * num_sequences), wide),
        )
        take = lambda index: jax.tree.map(lambda x: x[index], passes)  # noqa: E731
        if num_passes == 1:
            return one_pass(take(0), 0)
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one_pass, take(0), 0)
        )

        def add(total, index):
            return jax.tree.map(jnp.add, total, one_pass(take(index), index)), None

        return jax.lax.scan(add, zeros, jnp.arange(num_passes))[0]

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
    rebuild: Rebuild, policy: Policy, recipe: Recipe, *, rebuild_teacher: Rebuild | None = None
) -> Callable[[TrainState, Constants, Passes, ScheduleValues], tuple[TrainState, Metrics]]:
    """Returns the step as a pure function, to be jitted with the state donated.

    Its metrics are scalars: `loss` and its parts (`distillation_loss`, `compression_loss`,
    `lm_loss`, and `supervised_loss` in a stage "supervise"), `evicted` (share of hard decisions to
    evict), `grad_norm` (before clipping), `visible_keys` (mean number of keys that a token sees),
    `document_share` (share of the tokens that are not padding) and `skipped` (the loss or the
    gradient is not finite, so that the step changed neither parameters nor moments).
    """
    optimizer = make_optimizer(recipe)
    gradients = make_gradients(rebuild, policy, recipe, rebuild_teacher=rebuild_teacher)

    def step(
        state: TrainState, constants: Constants, passes: Passes, schedule: ScheduleValues
    ) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(schedule.key, state.step)
        gradient, metrics = gradients(state.parameters, constants, passes, schedule, key)
        metrics["grad_norm"] = optax.tree.norm(gradient)
        metrics["visible_keys"], metrics["document_share"] = visible_keys(passes)
        updates: Any
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.parameters)
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
        metrics["skipped"] = ~finite
        arrays = {
            name: array
            - (schedule.adapter_learning_rate if is_adapter(name) else schedule.learning_rate)
            * updates[name]
            for name, array in state.parameters.items()
        }
        kept = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (arrays, optimizer_state),
            (state.parameters, state.optimizer),
        )
        return TrainState(state.step + 1, *kept), metrics

    return step
