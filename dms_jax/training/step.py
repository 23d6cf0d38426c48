"""One optimizer step: teacher pass, student pass, gradients, AdamW.

The teacher is the original model with the vanilla cache; language modelling has no teacher. The
student runs the relaxed form of its policy's decisions on the same tokens. The noise of a decision
depends on the seed, the step and the sequence's index in the batch, not on how the batch is split.
Gradients are summed over A passes of B sequences. Each loss is already divided by the counts of the
whole batch, so that accumulation equals one large batch.

Only trained parameters have gradients and optimizer state. Parameters are kept in at least float32
and cast for the passes. On a mesh, `dms_jax.training.shards` says how the passes see them.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from dms_jax.model.attention import Relaxation
from dms_jax.model.layers import Routed
from dms_jax.model.rope import segment_positions
from dms_jax.model.split_rows import Share, SplitRow, of_own_tokens
from dms_jax.model.transformer import SequencePass
from dms_jax.policies import Policy, Vanilla
from dms_jax.training import compression_loss, losses
from dms_jax.training.parameters import Parameters, Rebuild, decays, is_adapter
from dms_jax.training.recipe import DistillationPositions, Recipe
from dms_jax.training.shards import Shards
from dms_jax.training.supervised_loss import supervised_loss

Metrics = dict[str, Array]


@struct.dataclass
class TrainState:
    """The state that a step changes.

    Attributes:
      step: number of steps taken, int32.
      parameters: the trained parameters.
      optimizer: the optimizer state of these parameters.
    """

    # The leaves may be shapes, to restore a checkpoint.
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
    """The sequences of an optimizer step: A passes of B sequences, or one pass without the axis A.

    Attributes:
      tokens: token ids.
      loss_mask: tokens that count in the loss, as targets of the previous position.
      segment_ids: number of each token's document within the sequence, 0 for padding; None for
        unpacked sequences.
    """

    tokens: Int[Array, "*A B T"]
    loss_mask: Bool[Array, "*A B T"]
    segment_ids: Int[Array, "*A B T"] | None = None

    @property
    def valid(self) -> Bool[Array, "*A B T"] | None:
        """The tokens that are not padding; None for unpacked sequences."""
        return None if self.segment_ids is None else self.segment_ids > 0

    @property
    def counts(self) -> Bool[Array, "*A B T"]:
        """The tokens that count in the loss; padding never does."""
        return self.loss_mask if self.valid is None else self.loss_mask & self.valid

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
        """Returns the positions where student and teacher are compared (see `Recipe`)."""
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
      supervised: share of keys that count as the least important in a stage "supervise"; None in
        other stages.
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
    """Returns clipping and AdamW, without the learning rate, which differs between parameters."""
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        optax.scale_by_adam(recipe.beta1, recipe.beta2, recipe.epsilon),
        optax.add_decayed_weights(recipe.weight_decay, mask=_decay_mask),
    )


def apply_gradient(
    recipe: Recipe, state: TrainState, gradient: Parameters, loss: Array, schedule: ScheduleValues
) -> tuple[TrainState, Array, Array]:
    """Returns the next state, the norm of the gradient before clipping, and whether it is finite.

    If the loss or the gradient is not finite, parameters and moments do not change.
    """
    norm = optax.tree.norm(gradient)
    updates: Any
    updates, optimizer = make_optimizer(recipe).update(gradient, state.optimizer, state.parameters)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    # Otherwise weight decay would change weights without a gradient.
    rate = schedule.learning_rate if schedule.supervised is None else 0.0
    parameters = {
        name: array - (schedule.adapter_learning_rate if is_adapter(name) else rate) * updates[name]
        for name, array in state.parameters.items()
    }
    kept = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (parameters, optimizer),
        (state.parameters, state.optimizer),
    )
    return TrainState(state.step + 1, *kept), norm, finite


def visible_keys(passes: Passes) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the mean number of keys visible to a document token, and the share of such tokens.

    # segment_ids  In: [1, 1, 1, 2, 2, 0]  Out: (1 + 2 + 3 + 1 + 2) / 5, 5 / 6
    """
    tokens = passes.tokens.reshape(-1, passes.tokens.shape[-1])
    ids = None if passes.segment_ids is None else passes.segment_ids.reshape(tokens.shape)
    valid = jnp.ones(tokens.shape, bool) if ids is None else ids > 0
    count = jnp.sum(valid, dtype=jnp.float32)
    keys = jnp.sum(jnp.where(valid, segment_positions(tokens, ids) + 1, 0), dtype=jnp.float32)
    return keys / jnp.maximum(count, 1), count / tokens.size


def _document_tokens(passes: Passes) -> Int[Array, ""]:
    """Returns the number of tokens that are not padding, at least 1."""
    valid = passes.valid
    return jnp.asarray(passes.tokens.size) if valid is None else jnp.maximum(valid.sum(), 1)


def expert_load(routed: Routed | None) -> Metrics:
    """Returns how evenly routers spread tokens over X experts; nothing without experts.

    `router_balance` is the auxiliary loss of the Switch Transformer (Fedus et al., arXiv
    2101.03961, equations 4 to 6), X sum_j f_j P_j, as a mean over layers: f_j is the share of
    expert j in all choices of the layer's tokens, P_j its mean probability. A uniform router has a
    balance of 1. (Transformers' `load_balancing_loss_func` counts the n choices of a token as n
    shares, over all layers at once.) `busiest_expert` is the largest f_j of all layers times X.

    Args:
      routed: means over all tokens.
    """
    if routed is None:
        return {}
    count = routed.tokens.shape[-1]
    shares = routed.tokens / routed.tokens.sum(-1, keepdims=True)
    return {
        "router_balance": count * (shares * routed.probabilities).sum(-1).mean(),
        "busiest_expert": count * shares.max(),
    }


class BatchWeights(NamedTuple):
    """Factors that turn the sums of a pass into its part of the means over the whole batch.

    Attributes:
      position: for positions where student and teacher are compared.
      target: for positions whose next token counts.
      sequence: for sequences.
      token: for tokens outside padding.
    """

    position: Float[Array, ""]
    target: Float[Array, ""]
    sequence: Float[Array, ""]
    token: Float[Array, ""]


class StepValues(NamedTuple):
    """The values that all passes and all devices share.

    Attributes:
      schedule: the values of the schedules.
      noise_key: key of the step's noise; None for no noise.
      weights: factors of the means.
    """

    schedule: ScheduleValues
    noise_key: PRNGKeyArray | None
    weights: BatchWeights


class PassInputs(NamedTuple):
    """The inputs of the loss of a device's pass, beside the parameters.

    Attributes:
      sequences: the sequences, with all their tokens.
      noise_keys: a key for each sequence; None for no noise.
      values: the values that all passes share.
      share: how the device gathers layers, and which tokens of the sequences it owns.
      taught: the same for the teacher.
    """

    sequences: Passes
    noise_keys: PRNGKeyArray | None
    values: StepValues
    share: Share
    taught: Share


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingStep:
    """The settings of an optimizer step, and the step itself as a pure function of its arrays.

    Attributes:
      rebuild: makes the student from its parameters.
      policy: the policy whose decisions are trained.
      recipe: the recipe.
      rebuild_teacher: makes the teacher, which has no low-rank updates; None if the student has
        none either.
      shards: how the parameters are split over the mesh of the context.
    """

    rebuild: Rebuild
    policy: Policy
    recipe: Recipe
    rebuild_teacher: Rebuild | None = None
    shards: Shards = dataclasses.field(default_factory=Shards)

    def step(
        self, state: TrainState, constants: Constants, passes: Passes, schedule: ScheduleValues
    ) -> tuple[TrainState, Metrics]:
        """Returns the next state and the metrics; jit it with the state donated.

        The metrics are scalars: `loss` and its parts (`distillation_loss`, `compression_loss`,
        `lm_loss`, and `supervised_loss` in a stage "supervise"), `evicted` (share of hard decisions
        to evict), `grad_norm` (before clipping), `visible_keys` (mean number of keys that a token
        attends to), `document_share` (share of the tokens that are not padding) and `skipped` (loss
        or gradient is not finite, so parameters and moments did not change). Mixtures of experts
        add `router_balance` and `busiest_expert` (`expert_load`).
        """
        key = jax.random.fold_in(schedule.key, state.step)
        gradient, metrics = self.gradients(state.parameters, constants, passes, schedule, key)
        routed: Any = metrics.pop("routed", None)
        metrics |= expert_load(routed)
        metrics["visible_keys"], metrics["document_share"] = visible_keys(passes)
        state, metrics["grad_norm"], finite = apply_gradient(
            self.recipe, state, gradient, metrics["loss"], schedule
        )
        metrics["skipped"] = ~finite
        return state, metrics

    def gradients(
        self,
        trained: Parameters,
        constants: Constants,
        passes: Passes,
        schedule: ScheduleValues,
        noise_key: PRNGKeyArray | None,
    ) -> tuple[Parameters, Metrics]:
        """Returns the gradients and the losses of a batch; without a key there is no noise."""
        num_passes, num_sequences, _ = passes.tokens.shape
        wide = jnp.promote_types(jax.tree.leaves(trained)[0].dtype, jnp.float32)
        compared = passes.distillation_mask(self.recipe.distillation_positions)
        weights = BatchWeights(
            position=1 / jnp.maximum(compared.sum(), 1).astype(wide),
            target=1 / jnp.maximum(passes.target_mask.sum(), 1).astype(wide),
            sequence=jnp.asarray(1 / (num_passes * num_sequences), wide),
            token=1 / _document_tokens(passes).astype(wide),
        )
        numbers = jnp.arange(num_passes * num_sequences).reshape(num_passes, num_sequences)
        return self.shards.map(self._shard_gradients)(
            trained,
            constants.frozen,
            constants.teacher,
            passes,
            numbers,
            StepValues(schedule, noise_key, weights),
        )

    def _shard_gradients(
        self,
        trained: Parameters,
        frozen: Parameters,
        teacher: Parameters,
        passes: Passes,
        numbers: Int[Array, "A B"],
        values: StepValues,
        shard: Array | None,
    ) -> tuple[Parameters, Metrics]:
        """Returns gradients and losses of one shard, summed over its sequences or tokens.

        Args:
          trained, frozen, teacher: this device's shards of the parameters.
          passes: this shard's sequences.
          numbers: index of each sequence in the batch, from which its noise is drawn.
          values: the values that all passes share.
          shard: index of this shard of the sequences' tokens; None if they are not split.
        """
        row = None
        if shard is not None:
            row = SplitRow(shard, self.shards.of_a_row, passes.tokens.shape[-1])
        dtype = self._pass_dtype(frozen | trained)
        whole, layouts = [trained, frozen, teacher], (self.shards, self.shards.of_teacher)
        shares = [Share(row=row) for _ in layouts]
        gather_once = self.shards.whole_layers and len(numbers) > 1
        if gather_once:
            own, taught = layouts
            whole = [
                layout.gather_layers(arrays, dtype)
                for layout, arrays in zip((own, own, taught), whole, strict=True)
            ]
        elif self.shards.several:
            shares = [
                Share(functools.partial(each.gather_layer, dtype=dtype), row) for each in layouts
            ]

        def pass_gradients(index: int | Array) -> tuple[Parameters, Metrics]:
            sequences, own_numbers = jax.tree.map(lambda x: x[index], (passes, numbers))
            noise_keys = None
            if values.noise_key is not None:
                fold = functools.partial(jax.random.fold_in, values.noise_key)
                noise_keys = jax.vmap(fold)(own_numbers)
            inputs = PassInputs(sequences, noise_keys, values, *shares)
            gradient_of = jax.value_and_grad(self._pass_loss, has_aux=True)
            (_, parts), gradient = gradient_of(*whole, inputs)
            return jax.tree.map(lambda x, like: x.astype(like.dtype), gradient, trained), parts

        if len(numbers) == 1:
            return pass_gradients(0)
        shapes = jax.eval_shape(functools.partial(pass_gradients, 0))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def add(total, index):
            return jax.tree.map(jnp.add, total, pass_gradients(index)), None

        (gradient, parts), _ = jax.lax.scan(add, zeros, jnp.arange(len(numbers)))
        return (self.shards.scatter_layers(gradient) if gather_once else gradient), parts

    def _pass_loss(
        self, trained: Parameters, frozen: Parameters, teacher: Parameters, inputs: PassInputs
    ) -> tuple[Array, Metrics]:
        """Returns a pass's contribution to the loss of the batch, and its parts."""
        schedule, weights = inputs.values.schedule, inputs.values.weights
        if schedule.supervised is not None:
            return self._supervised_loss(trained, frozen, inputs)
        recipe, sequences, row = self.recipe, inputs.sequences, inputs.share.row
        current = frozen | trained
        relaxation = None
        if self.policy.retrofit.possible:
            relaxation = Relaxation(
                noise_keys=inputs.noise_keys, neuron_scale=schedule.neuron_scale
            )
        result = self._hidden_states(
            self.rebuild,
            self.policy,
            current,
            inputs,
            relaxation=relaxation,
            remat="all_but_attention" if recipe.remat == "auto" else recipe.remat,
        )
        head = self._output_head(current, result.hidden, trained=trained)
        sums = losses.token_losses(
            head,
            self._teacher_head(current, teacher, inputs, head.matrix),
            targets=of_own_tokens(row, jnp.roll(sequences.tokens, -1, axis=-1)),
            mask=of_own_tokens(row, sequences.distillation_mask(recipe.distillation_positions)),
            target_mask=of_own_tokens(row, sequences.target_mask),
            temperature=recipe.distillation_temperature,
            text_weight=recipe.text_weight,
        )
        shares = compression_loss.evicted_shares(result.decisions, sequences.valid)
        distance = recipe.compression_weight * compression_loss.compression_loss(
            shares, schedule.target
        )
        per_sequence = weights.sequence
        if row is not None:  # every shard has the decisions of all tokens
            per_sequence /= row.shards
        parts = {
            "distillation_loss": sums.distillation * weights.position,
            "lm_loss": sums.language_modeling * weights.target,
            "compression_loss": jnp.sum(distance) * per_sequence,
            "evicted": jnp.sum(jnp.mean(shares, axis=(0, 2))) * per_sequence,
        }
        distils = recipe.loss == "distillation"
        main = sums.main * (weights.position if distils else weights.target)
        loss = main + parts["compression_loss"]
        if result.routed is not None:
            parts["routed"] = jax.tree.map(lambda x: x * weights.token, result.routed)
        return loss, {"loss": loss, **parts}

    def _supervised_loss(
        self, trained: Parameters, frozen: Parameters, inputs: PassInputs
    ) -> tuple[Array, Metrics]:
        """Returns loss and parts in a stage "supervise", in which only the adapter learns."""
        learned, values = self.policy.retrofit.supervision, inputs.values
        assert learned is not None
        assert values.schedule.supervised is not None
        trained = {x: y if is_adapter(x) else jax.lax.stop_gradient(y) for x, y in trained.items()}
        relaxation = Relaxation(supervised=True)
        result = self._hidden_states(
            self.rebuild, self.policy, frozen | trained, inputs, relaxation=relaxation
        )
        assert result.supervision is not None
        distance = supervised_loss(learned, result.supervision, values.schedule.supervised)
        shares = compression_loss.evicted_shares(result.decisions, inputs.sequences.valid)
        weight = values.weights.sequence
        loss, zero = jnp.sum(distance) * weight, jnp.zeros_like(distance[0])
        return loss, {
            "loss": loss,
            "supervised_loss": loss,
            **dict.fromkeys(("distillation_loss", "lm_loss", "compression_loss"), zero),
            "evicted": jnp.sum(jnp.mean(shares, axis=(0, 2))) * weight,
        }

    def _teacher_head(
        self, current: Parameters, teacher: Parameters, inputs: PassInputs, matrix: Array
    ) -> losses.Head | None:
        """Returns the hidden states and output matrix of the teacher; None without a teacher.

        `matrix` is the student's, for a teacher that shares all of the student's parameters.
        """
        if self.recipe.loss != "distillation":
            return None
        original = jax.lax.stop_gradient(current | teacher)
        rebuild = self.rebuild_teacher or self.rebuild
        inputs = inputs._replace(share=inputs.taught)
        hidden = jax.lax.stop_gradient(
            self._hidden_states(rebuild, Vanilla(), original, inputs).hidden
        )
        if not teacher:
            return losses.Head(hidden, matrix)
        return self._output_head(original, hidden, layout=self.shards.of_teacher)

    def _hidden_states(
        self,
        rebuild: Rebuild,
        policy: Policy,
        arrays: Parameters,
        inputs: PassInputs,
        **options: Any,
    ) -> SequencePass:
        """Runs a model over the device's tokens of a pass."""
        model = rebuild(
            arrays | {"embedding": arrays["embedding"].astype(self._pass_dtype(arrays))}
        )
        return model(
            of_own_tokens(inputs.share.row, inputs.sequences.tokens),
            policy,
            segment_ids=inputs.sequences.segment_ids,
            unroll=self.recipe.unroll,
            share=inputs.share,
            **options,
        )

    def _output_head(
        self,
        arrays: Parameters,
        hidden: Array,
        *,
        trained: Parameters | None = None,
        layout: Shards | None = None,
    ) -> losses.Head:
        """Returns hidden states and output matrix; the matrix gets a gradient if it is trained.

        `layout` is that of the arrays; by default the student's.
        """
        name = "lm_head" if "lm_head" in arrays else "embedding"
        matrix = (layout or self.shards).whole(arrays, name, hidden.dtype)
        parameter = (trained or {}).get(name)
        if name == "lm_head":
            matrix, parameter = matrix.T, None if parameter is None else parameter.T
        return losses.Head(hidden, matrix, parameter)

    def _pass_dtype(self, arrays: Parameters) -> Any:
        return jnp.dtype(self.recipe.compute_dtype or arrays["embedding"].dtype)
