"""The program in which chat templates run; `chat.py` starts it as a separate process.

A template is code from the checkpoint's author. jinja2's sandbox keeps it from reaching anything
outside, but not from running forever or allocating all memory; a separate process can be limited.
This file imports nothing from the library, so that it starts quickly.

Requests and answers are lines of JSON on standard input and output:

    {"template": "...", "variables": {...}}  ->  {"text": "..."}  or  {"error": "..."}
"""

import datetime
import functools
import json
import signal
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

MAX_TEXT = 64 * 2**20  # characters
_MAX_ERROR = 1000


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; it prints its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message)[:_MAX_ERROR])


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def answer(line: bytes) -> dict[str, Any]:
    """Answer a request, whatever the template does, unless it ends the process."""
    try:
        request = json.loads(line)
        text = _compile(request["template"]).render(**request["variables"])
    except MemoryError:
        return {"error": "it asks for too much memory", "spent": True}
    except jinja2.TemplateError as error:
        return {"error": f"it says: {str(error)[:_MAX_ERROR]}"}
    except Exception as error:  # a template can raise anything
        return {"error": f"{type(error).__name__}: {str(error)[:_MAX_ERROR]}"}
    if len(text) > MAX_TEXT:
        return {"error": f"it writes {len(text)} characters, more than {MAX_TEXT}"}
    return {"text": text}


def _bound_memory(most_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))


def main() -> None:
    """Serve requests until standard input ends."""
    most_bytes, most_seconds = int(sys.argv[1]), float(sys.argv[2])
    _bound_memory(most_bytes)
    output = sys.stdout.buffer
    output.write(b"ready\n")
    output.flush()
    for line in sys.stdin.buffer:
        # The parent kills this process after the time limit; the alarm is for a dead parent.
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, most_seconds)
        reply = answer(line)
        try:
            encoded = json.dumps(reply).encode("ascii")
        except MemoryError:
            encoded = b'{"error": "it asks for too much memory", "spent": true}'
        output.write(encoded + b"\n")
        output.flush()
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
