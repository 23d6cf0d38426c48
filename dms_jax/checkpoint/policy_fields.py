"""The fields of `config.json` that store a cache policy.

DMS is stored as the `dms_*` fields of NVIDIA's configs (Model-Optimizer `Qwen3ConfigDMS`, and the
checkpoint nvidia/Qwen3-8B-DMS-8x, which has only `dms_window_size` and `dms_cr`, the latter for
information). Absent fields have NVIDIA's defaults. `dms_decision_*` are our additions, written only
if they differ from the behaviour of NVIDIA's code. Every other policy is stored under
`cache_policy`.
"""

from collections.abc import Mapping
from typing import Any

from dms_jax import policies
from dms_jax.checks import check
from dms_jax.errors import ConfigError
from dms_jax.policies import DMS, Policy, Vanilla

POLICY_KEY = "cache_policy"

# Hugging Face field -> (field of DMS, type)
_FIELDS: dict[str, tuple[str, type]] = {
    "dms_window_size": ("window", int),
    "dms_alpha_scale": ("alpha_scale", float),
    "dms_initial_alpha_offset": ("alpha_offset", float),
    "dms_alpha_per": ("per", str),
    "dms_tau": ("temperature", float),
    "dms_decision_shift": ("shift", int),
    "dms_decision_rule": ("decisions", str),
    "dms_decision_seed": ("seed", int),
}
_OURS = ("dms_decision_shift", "dms_decision_rule", "dms_decision_seed")


def policy_from_hf(config: Mapping[str, Any], *, has_adapter: bool) -> Policy | None:
    """Reads the policy that a `config.json` declares; None if it declares none.

    Args:
        config: the contents of `config.json`.
        has_adapter: whether the checkpoint has adapter tensors, which sets the source of decisions
            if `dms_separate_alpha` is absent.

    Raises:
        ConfigError: the declaration is malformed, or two declarations differ.
    """
    declared = None
    if config.get(POLICY_KEY) is not None:
        if not isinstance(config[POLICY_KEY], Mapping):
            raise ConfigError(f"{POLICY_KEY} must be a JSON object with a name")
        declared = policies.from_dict(dict(config[POLICY_KEY]))
    if not any(config.get(name) is not None for name in (*_FIELDS, "dms_separate_alpha")):
        return declared
    dms = _dms_from_hf(config, has_adapter)
    if declared is not None and declared != dms:
        raise ConfigError(
            f"config.json declares two policies, {POLICY_KEY} and dms_* fields; keep one"
        )
    return dms


def policy_to_hf(policy: Policy, *, has_adapter: bool) -> dict[str, Any]:
    """Builds the fields of `config.json` that declare the policy; none for plain Vanilla."""
    if isinstance(policy, DMS):
        fields: dict[str, Any] = {
            name: getattr(policy, field) for name, (field, _) in _FIELDS.items()
        }
        for name in _OURS:
            field, _ = _FIELDS[name]
            if fields[name] == getattr(DMS, field):  # the default
                del fields[name]
        return fields | {"dms_separate_alpha": policy.source == "adapter"}
    if isinstance(policy, Vanilla) and not has_adapter:
        return {}
    return {POLICY_KEY: policy.to_dict()}


def _dms_from_hf(config: Mapping[str, Any], has_adapter: bool) -> DMS:
    if config.get("dms_disable_eviction"):
        raise ConfigError(
            "dms_disable_eviction is set: the checkpoint asks for DMS without eviction. Remove "
            "it, and generate with policy=Vanilla() to keep every token."
        )
    options: dict[str, Any] = {}
    for name, (field, kind) in _FIELDS.items():
        value = config.get(name)
        if value is None:
            continue
        options[field] = check(name, value, kind)
    separate = config.get("dms_separate_alpha")
    separate = has_adapter if separate is None else check("dms_separate_alpha", separate, bool)
    return DMS(source="adapter" if separate else "query_neuron", **options)
