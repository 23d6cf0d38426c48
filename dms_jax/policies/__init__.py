"""Cache policies, one file per published method, and their registry.

To register a policy, import it here and list it in `__all__`, which type checkers read. `from_dict`
does not find bases, nor subclasses defined elsewhere.
"""

import dataclasses
from typing import Any

from dms_jax.checks import check_names, guess, show
from dms_jax.errors import ConfigError
from dms_jax.policies.allocation import AdaKV, PyramidKV
from dms_jax.policies.base import Policy
from dms_jax.policies.dmc import DMC
from dms_jax.policies.dms import DMS
from dms_jax.policies.expected_attention import ExpectedAttention
from dms_jax.policies.fixed_pooling import FixedPooling
from dms_jax.policies.h2o import H2O
from dms_jax.policies.kcache import KCache
from dms_jax.policies.keydiff import KeyDiff
from dms_jax.policies.knorm import Knorm
from dms_jax.policies.kvpop import KVpop
from dms_jax.policies.kvzap import KVzap
from dms_jax.policies.quest import Quest
from dms_jax.policies.random_eviction import RandomEviction
from dms_jax.policies.random_selection import RandomSelection
from dms_jax.policies.rkv import RKV
from dms_jax.policies.snapkv import SnapKV
from dms_jax.policies.streaming import StreamingLLM
from dms_jax.policies.tova import TOVA
from dms_jax.policies.triattention import TriAttention
from dms_jax.policies.vanilla import Vanilla

# The registry: listed names are known to `from_dict`, in this order, and public in `dms_jax`.
__all__ = [  # noqa: RUF022
    "Policy",
    "Vanilla",
    "DMS",
    "DMC",
    "KVzap",
    "KVpop",
    "FixedPooling",
    "TOVA",
    "H2O",
    "Quest",
    "KCache",
    "StreamingLLM",
    "RandomEviction",
    "SnapKV",
    "Knorm",
    "KeyDiff",
    "ExpectedAttention",
    "RKV",
    "TriAttention",
    "RandomSelection",
    "AdaKV",
    "PyramidKV",
]

POLICIES: dict[str, type[Policy]] = {
    name: globals()[name] for name in __all__ if globals()[name] is not Policy
}


def from_dict(data: dict[str, Any]) -> Policy:
    """Builds a policy from `Policy.to_dict` data.

    Raises:
      ConfigError: if the name or an option is unknown, or a value does not fit.
    """
    if not isinstance(data, dict):
        raise ConfigError(
            f"A policy is given as a dict with its name and options, got {data!r:.80}."
        )
    fields = dict(data)
    name = fields.pop("name", None)
    if not isinstance(name, str) or name not in POLICIES:
        meant = guess(name, POLICIES) if isinstance(name, str) else ""
        raise ConfigError(f"Unknown cache policy {name!r}{meant}; known are {', '.join(POLICIES)}.")
    policy = POLICIES[name]
    check_names(name, fields, [field.name for field in dataclasses.fields(policy)])
    inner = {
        field.name: from_dict(fields[field.name])
        for field in dataclasses.fields(policy)
        if field.type is Policy and isinstance(fields.get(field.name), dict)
    }
    return policy(**fields | inner)


def as_policy(policy: Any) -> Policy:
    """Returns the given policy, or the named one with its default options.

    # In: "TOVA"  Out: TOVA()

    Raises:
      ConfigError: the argument is neither, or the name is unknown.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return from_dict({"name": policy})
    if isinstance(policy, type) and issubclass(policy, Policy):
        raise ConfigError(f"Not a cache policy: {show(policy)}. Write {policy.name}().")
    raise ConfigError(f"Not a cache policy: {show(policy)}. Use e.g. dms_jax.TOVA(budget=512).")
