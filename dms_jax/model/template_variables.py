"""Variables of a chat template that a caller may give, and those that each conversation sets."""

from collections.abc import Mapping
from typing import Any

from dms_jax.checks import show
from dms_jax.errors import ConfigError

# The template, the conversation, whether to begin an answer, and Jinja's own names.
RESERVED = frozenset({"template", "messages", "add_generation_prompt", "self"})


def check_template_variables(what: str, variables: Mapping[Any, Any]) -> None:
    """Refuses names that a caller may not set.

    Args:
      what: where they were given, for the message.
      variables: values by name.

    Raises:
      ConfigError: a name is reserved, or not a string.
    """
    if unnamed := [name for name in variables if not isinstance(name, str)]:
        raise ConfigError(
            f"{what}: the names of a chat template's variables are texts, got {show(unnamed[0])}."
        )
    if taken := sorted(RESERVED & variables.keys()):
        raise ConfigError(
            f"{what}: {', '.join(taken)} cannot be given as a variable of the chat template: every "
            "conversation sets it."
        )
