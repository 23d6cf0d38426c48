"""Checks of the numbers in a script's settings."""

import dataclasses
import math
from typing import Any

import dms_jax


def check_numbers(config: Any, *, may_be_zero: tuple[str, ...] = ()) -> None:
    """Raises ConfigError unless the numbers of a script's settings are finite and positive.

    Args:
      config: the settings; an option of several numbers has at least one.
      may_be_zero: options that may be 0.
    """
    for field in dataclasses.fields(config):
        value, option = getattr(config, field.name), f"--{field.name.replace('_', '-')}"
        if value == () and field.default != ():
            raise dms_jax.ConfigError(f"{option}: give at least one.")
        for each in value if isinstance(value, tuple) else (value,):
            if type(each) not in (int, float):  # a bool is no number
                continue
            if not math.isfinite(each):
                raise dms_jax.ConfigError(f"{option} must be finite, got {value}")
            if each < 0 or (each == 0 and field.name not in may_be_zero):
                must = "not be negative" if field.name in may_be_zero else "be positive"
                raise dms_jax.ConfigError(f"{option} must {must}, got {value}")
