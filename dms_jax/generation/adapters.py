"""The adapters of an engine, and the policy under which it runs them.

An engine has one cache, and so one policy. Adapters that were trained for another policy are
refused: they would need a separate pool, and so a separate engine or server. Ranks may differ
(`dms_jax.model.adapters`).
"""

import pathlib
from collections.abc import Mapping

from dms_jax.checkpoint.adapter import differing_shape
from dms_jax.checkpoint.loading import load_adapters
from dms_jax.checks import guess, require, show
from dms_jax.errors import ConfigError
from dms_jax.model.adapters import AdapterWeights, Slots, check_policy, zeros_keep_all
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy, as_policy
from dms_jax.policies.vanilla import Vanilla

# An adapter: its directory, a model that has it, or the weights read from either.
GivenAdapter = str | pathlib.Path | LanguageModel | AdapterWeights


def choose(
    model: LanguageModel, policy: Policy | str | None, given: Mapping[str, GivenAdapter] | None
) -> tuple[Policy, Slots | None]:
    """Returns the policy of an engine, and its adapters; None without adapters.

    Args:
      model: the model.
      policy: the policy to run; None for the one that the adapters (and the model, if it declares
        one) were trained for.
      given: the adapters by name.

    Raises:
      ConfigError: the policy does not fit the model or an adapter, or a name is malformed.
      CheckpointError: an adapter cannot be read, or belongs to another base.
    """
    if not given:
        return model.resolve_policy(policy), None
    adapters = read(model, given)
    own = AdapterWeights.of(model)
    if policy is None:
        each = {f"adapter {name!r}": adapter.policy for name, adapter in adapters.items()}
        if not own.is_empty or model.policy != Vanilla():
            each["the model"] = model.policy
        (first, policy), *others = each.items()
        for name, other in others:
            require(
                other == policy,
                f"An engine has one policy: {first} was trained for {policy}, and {name} for "
                f"{other}. Run them apart, or give one policy for all.",
            )
    policy = as_policy(policy)
    for name, adapter in adapters.items():
        _check(model, name, adapter, policy)
    alone: dict[str | None, AdapterWeights] = {}
    if _runs_alone(model, own, policy):
        alone[None] = own
    each = {name: _read_by(policy, adapter) for name, adapter in (alone | adapters).items()}
    return policy, Slots.of(each)


def read(model: LanguageModel, given: Mapping[str, GivenAdapter]) -> dict[str, AdapterWeights]:
    """Returns adapters of a model; raises ConfigError or CheckpointError."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"adapters must be a dict, name -> adapter, got {show(given)}.")
    for name in given:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"The name of an adapter must be a text, got {show(name)}.")
    paths = {
        name: each
        for name, each in given.items()
        if not isinstance(each, LanguageModel | AdapterWeights)
    }
    loaded = load_adapters(model, paths)
    for name, each in given.items():
        if isinstance(each, AdapterWeights):
            loaded[name] = each
        if not isinstance(each, LanguageModel):
            continue
        if differences := differing_shape(model.config, each.config):
            raise ConfigError(f"Adapter {name!r} is of another model: {'; '.join(differences)}.")
        loaded[name] = AdapterWeights.of(each)
        require(
            not loaded[name].is_empty,
            f"Adapter {name!r}: this model has neither a decision head nor low-rank updates.",
        )
    return {name: loaded[name] for name in given}


def replaced(
    model: LanguageModel, slots: Slots | None, policy: Policy, given: Mapping[str, GivenAdapter]
) -> Slots | None:
    """Returns an engine's adapters after replacing some, and the model's own adapter.

    Raises:
      ConfigError: a name is unknown, or a new adapter does not fit in the old one's place.
      CheckpointError: an adapter cannot be read, or belongs to another base.
    """
    for name in given if isinstance(given, Mapping) else ():
        check_name(slots, name)
    if slots is not None and None in slots.names:
        slots = slots.replaced(None, _read_by(policy, AdapterWeights.of(model)))
    for name, adapter in read(model, given).items():
        assert slots is not None
        before = slots.adapters[slots.names.index(name)].policy
        require(
            adapter.policy == before,
            f"Adapter {name!r} was trained for {adapter.policy}, and the one in its place for "
            f"{before}. Make an engine, or start the server, with this one.",
        )
        _check(model, name, adapter, policy)
        slots = slots.replaced(name, _read_by(policy, adapter))
    return slots


def check_name(slots: Slots | None, name: str | None) -> None:
    """Raises ConfigError unless `name` is one of these adapters."""
    if slots is None:
        require(name is None, f"There is no adapter {show(name)}: this engine has none.")
        return
    known = [each for each in slots.names if each is not None]
    if name is None:
        require(
            None in slots.names,
            "The model itself does not run under this policy, only its adapters do: name one of "
            f"{', '.join(known)}.",
        )
    elif name not in slots.names:
        meant = guess(name, known) if isinstance(name, str) else ""
        raise ConfigError(f"There is no adapter {show(name)}{meant}: there are {', '.join(known)}.")


def _read_by(policy: Policy, adapter: AdapterWeights) -> AdapterWeights:
    """Returns the weights of an adapter that a policy reads."""
    return adapter.without_head() if policy.retrofit.adapter is None else adapter


def _check(model: LanguageModel, name: str, adapter: AdapterWeights, policy: Policy) -> None:
    try:
        check_policy(model, adapter, policy)
    except ConfigError as error:
        raise ConfigError(f"Adapter {name!r}: {error}") from error


def _runs_alone(model: LanguageModel, own: AdapterWeights, policy: Policy) -> bool:
    """Whether the model can run without an adapter, if need be with a head of zeros."""
    try:
        model.resolve_policy(policy)
    except ConfigError:
        return own.is_empty and model.policy == Vanilla() and zeros_keep_all(policy)
    return True
