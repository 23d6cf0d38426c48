"""Mistakes in `dms_jax/training`."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/training/"
STEP = "tests/training/test_step.py"
CHECKPOINTS = "tests/training/test_checkpoints.py"
COUNTS = "tests/training/test_what_counts.py"
TRAIN = "tests/training/test_train.py"
RETROFIT = "tests/training/test_retrofit.py"

MUTANTS = [
    Mutant(
        "training: a step that is not finite is taken",
        FOLDER + "step.py",
        "lambda new, old: jnp.where(finite, new, old),",
        "lambda new, old: new,",
        (f"{RETROFIT}::test_skipped_step_changes_only_the_step_number",),
    ),
    Mutant(
        "training: low-rank updates are part of the teacher",
        FOLDER + "program.py",
        "            rebuild_teacher=self._rebuild_teacher,\n",
        "            rebuild_teacher=None,\n",
        ("tests/training/test_low_rank.py::test_further_training_and_merging",),
    ),
    Mutant(
        "training: the teacher is the moving student",
        FOLDER + "step.py",
        "original = jax.lax.stop_gradient(current | teacher)",
        "original = jax.lax.stop_gradient(current)",
        (f"{COUNTS}::test_teacher_is_fixed_and_uncounted_tokens_ignored",),
    ),
    Mutant(
        "training: a supervised stage decays the weights that it does not train",
        FOLDER + "step.py",
        "rate = schedule.learning_rate if schedule.supervised is None else 0.0",
        "rate = schedule.learning_rate",
        ("tests/training/test_scorers.py::test_warm_up_trains_adapter_then_ramp_trains_all",),
    ),
    Mutant(
        "training: importance leaves out low-rank updates",
        "dms_jax/model/transformer.py",
        "layer.attention.o_proj.matrix,",
        "layer.attention.o_proj.kernel[...],",
        ("tests/training/test_scorers.py::test_importance_includes_low_rank_updates",),
    ),
    Mutant(
        "training: compression shares count padding",
        FOLDER + "step.py",
        "shares = compression_loss.evicted_shares(result.decisions, sequences.valid)",
        "shares = compression_loss.evicted_shares(result.decisions, None)",
        (f"{STEP}::test_padding_changes_nothing",),
    ),
    Mutant(
        "training: the last position's target is the first token",
        FOLDER + "step.py",
        "after = jnp.roll(self.counts, -1, axis=-1).at[..., -1].set(False)",
        "after = jnp.roll(self.counts, -1, axis=-1)",
        (f"{COUNTS}::test_the_last_token_of_a_sequence_predicts_nothing",),
    ),
    Mutant(
        "training: every pass of a step has the same noise",
        FOLDER + "step.py",
        "noise_keys = jax.vmap(fold)(own_numbers)",
        "noise_keys = jax.vmap(fold)(jnp.arange(len(own_numbers)))",
        (f"{STEP}::test_every_pass_draws_its_own_noise",),
    ),
    Mutant(
        "training: the adapter is cast for the passes",
        FOLDER + "parameters.py",
        "return {name: x if is_adapter(name) else x.astype(dtype) for name, x in arrays.items()}",
        "return {name: x.astype(dtype) for name, x in arrays.items()}",
        ("tests/training/test_parameters.py::test_adapter_stays_float32_in_passes",),
    ),
    Mutant(
        "training: the first token of a DMC document counts as merged",
        "dms_jax/policies/dmc.py",
        "first = (chunk.tokens.positions == 0)[:, None]",
        "first = (chunk.tokens.positions < 0)[:, None]",
        ("tests/policies/test_merging.py::test_soft_form_does_not_cross_documents",),
    ),
    Mutant(
        "training: weight decay pulls at the old, clipped gradient alone",
        FOLDER + "step.py",
        """        optax.scale_by_adam(recipe.beta1, recipe.beta2, recipe.epsilon),
        optax.add_decayed_weights(recipe.weight_decay, mask=_decay_mask),
""",
        """        optax.add_decayed_weights(recipe.weight_decay, mask=_decay_mask),
        optax.scale_by_adam(recipe.beta1, recipe.beta2, recipe.epsilon),
""",
        (f"{TRAIN}::test_a_run_is_adamw_on_the_language_modelling_loss",),
    ),
    Mutant(
        "training: the neurons are zeroed before their last step of decay",
        FOLDER + "loop.py",
        "before = recipe.progress(step - 1, policy) if step else None",
        "before = recipe.progress(step, policy) if step else None",
        (f"{RETROFIT}::test_the_borrowed_neuron_decays_and_is_zeroed",),
    ),
    Mutant(
        "training: the warm-up starts at no rate at all",
        FOLDER + "recipe.py",
        "return peak * (self.step + 1) / warmup",
        "return peak * self.step / warmup",
        ("tests/training/test_recipes.py::test_the_learning_rate_follows_optax",),
    ),
    Mutant(
        "training: the spread of heads pulls the layer's mean along",
        FOLDER + "compression_loss.py",
        "middle = jax.lax.stop_gradient(jnp.mean(shares, axis=-1, keepdims=True))",
        "middle = jnp.mean(shares, axis=-1, keepdims=True)",
        ("tests/training/test_compression_loss.py::test_head_spread_keeps_the_mean",),
    ),
    Mutant(
        "training: a grafted adapter takes the model's type",
        FOLDER + "parameters.py",
        "dtype = jnp.promote_types(transformer.embedding[...].dtype, jnp.float32)",
        "dtype = transformer.embedding[...].dtype",
        ("tests/training/test_parameters.py::test_new_adapter_evicts_nothing_and_shares_weights",),
    ),
    Mutant(
        "training: visible keys count those of the documents before",
        FOLDER + "step.py",
        "segment_positions(tokens, ids) + 1",
        "segment_positions(tokens, None) + 1",
        ("tests/training/test_flops.py::test_visible_keys_are_those_of_the_document",),
    ),
    Mutant(
        "checkpoints: those that the divergence has spoilt stay",
        FOLDER + "loop.py",
        "self._directory.checkpoints.discard(step - self._skipped_in_a_row)",
        "self._directory.checkpoints.discard(step)",
        (f"{CHECKPOINTS}::test_checkpoints_followed_only_by_nan_are_dropped",),
    ),
    Mutant(
        "data: a place behind the end of a document is taken",
        "dms_jax/data/packing.py",
        'if self._offset > len(document["tokens"]):',
        "if False:",
        ("tests/data/test_packing.py::test_state_in_a_document_that_became_shorter_is_refused",),
    ),
    Mutant(
        "streams: a row takes the stream of its place among the rows of its process",
        "dms_jax/data/batches.py",
        "for row in self._assignment.rows]\n        self._first",
        "for row in range(len(self._assignment.rows))]\n        self._first",
        ("tests/data/test_batches.py::test_rows_do_not_depend_on_the_processes",),
    ),
    Mutant(
        "training: a split that is refused has made its directory before",
        "dms_jax/training/api.py",
        "    check_split(recipe, policy, mesh)\n",
        "",
        ("tests/training/test_mesh.py::test_a_refused_run_leaves_no_directory",),
    ),
    Mutant(
        "processes: an array that was read leaves a copy on the host",
        "dms_jax/processes.py",
        "return jax.device_get(again)",
        "return jax.device_get(value)",
        ("tests/training/test_processes.py::test_reading_an_array_leaves_no_copy_on_the_host",),
    ),
]
