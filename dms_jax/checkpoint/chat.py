"""Render the chat template of a checkpoint, in jinja2's sandbox.

A template is code that came with the checkpoint: it runs where it can neither change what it is
given nor reach anything outside.
"""

import datetime
import functools
import json
from typing import Any

from dms_jax.errors import DataError


def render_chat(template: str, **variables: Any) -> str:
    """Render `template` with `messages`, `add_generation_prompt` and what else it reads.

    Raises:
        DataError: the template does not compile, or refuses these messages.
    """
    import jinja2

    try:
        return _compile(template).render(**variables)
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template refused the conversation: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise DataError(f"the chat template failed on the conversation: {error}") from error


@functools.lru_cache(maxsize=8)
def _compile(template: str):
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's words for training; it prints its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)
