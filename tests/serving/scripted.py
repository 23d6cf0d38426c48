"""A server with scripted answers: HTTP, templates and formats are the library's; there is no model.

An answer is a function of the text of its prompt, as rendered by the chat template.
"""

import contextlib
import dataclasses
import itertools
import json
import pathlib
import random
import threading
from collections.abc import Callable, Iterator

import dms_jax
from dms_jax.cache.accounting import Usage
from dms_jax.checkpoint import Tokenizer
from dms_jax.config import ModelConfig
from dms_jax.generation import Completion
from dms_jax.generation.call_formats import FORMATS
from dms_jax.serving.rpc import ServedModel
from dms_jax.serving.service import Delta, Service, Snapshot
from tests.serving.support import Client, connected, stories

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "tokenizers" / "qwen2"
MAX_TOKENS = 4096
CACHED = 7  # cached tokens of each prompt, in usage

# Simplified templates of the models of each format.
TEMPLATES = {
    "hermes": """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Return calls as <tool_call>
{"name": ..., "arguments": ...}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if loop.first and m.role == 'system' %}
{%- elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}""",
    "llama3": """\
{%- for m in messages %}<|{{ m.role }}|>
{%- if loop.last and tools %}Answer with {"name": function name, "parameters": its arguments}.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": \
{{ m.tool_calls[0].function.arguments | tojson }}}
{%- else %}{{ m.content }}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}""",
    "mistral": """\
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids") }}{% endif -%}
{{ {"name": call.function.name, "arguments": call.function.arguments, "id": call.id} | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}]</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ {"content": m.content, "call_id": m.tool_call_id} \
| tojson }}[/TOOL_RESULTS]
{%- elif m.role == 'assistant' %}{{ m.content }}</s>
{%- else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}""",
    "harmony": """\
<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- set called = namespace(name=none) %}
{%- if tools %}<|start|>developer<|message|># Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if called.name is none %}{{ raise_exception('no call') }}{% endif -%}
<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>\
{{ m.content | tojson }}<|end|>
{%- elif m.tool_calls %}
{%- if m.thinking and m.content %}{{ raise_exception('both') }}{% endif %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
{%- endif %}
{%- set called.name = m.tool_calls[0].function.name -%}
<|start|>assistant to=functions.{{ called.name }}<|channel|>commentary json<|message|>\
{{ m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}""",
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ",
}

Script = Callable[[str], str]


def tokenizer(template: str) -> Tokenizer:
    """A tokenizer of bytes and some words, with one of the templates, or a text."""
    found = Tokenizer.from_directory(GOLDEN)
    assert found is not None
    found.chat_template = TEMPLATES.get(template, template)
    return found


class ScriptedService(Service):
    """A fake service that answers at once, in deltas of random lengths.

    Attributes:
      prompts: the texts of all prompts, in order.
      samplings: the sampling of each.
      priorities: the priority of each.
    """

    def __init__(self, tokenizer: Tokenizer, script: Script):
        self._tokenizer, self._script = tokenizer, script
        self._indices, self._random = itertools.count(), random.Random(0)
        self.prompts: list[str] = []
        self.samplings: list[dms_jax.Sampling] = []
        self.priorities: list[int] = []

    def submit(self, prompts, sampling, listener, *, adapter=None, priority=0) -> list[int]:
        indices = [next(self._indices) for _ in prompts]
        texts = [self._tokenizer.decode(each, skip_special_tokens=False) for each in prompts]
        self.prompts += texts
        self.samplings += [sampling] * len(prompts)
        self.priorities += [priority] * len(prompts)

        def answer():
            for choice, text in enumerate(texts):
                for delta in self._deltas(
                    choice, len(prompts[choice]), self._script(text), sampling
                ):
                    listener(delta)
                    self.after_chunk()

        threading.Timer(0.01, answer).start()
        return indices

    def _deltas(self, choice, prompt_tokens, text, sampling) -> Iterator[Delta]:
        reason, tokens = "end", self._tokenizer.encode(text, False)
        for stop in sampling.stop_strings:
            if stop in text:
                text, reason = text.partition(stop)[0], "stop"
        if len(tokens) > sampling.max_new_tokens:
            tokens, reason = tokens[: sampling.max_new_tokens], "length"
            text = self._tokenizer.decode(tokens)
        usage = Usage(
            prompt_tokens=prompt_tokens,
            new_tokens=len(tokens),
            kv_reads=1.0,
            peak_tokens=1.0,
            peak_held_tokens=1.0,
            live_tokens=1.0,
            compression_ratio=1.0,
            cache_bytes=1,
            peak_cache_bytes=1,
            cached_tokens=CACHED,
        )
        at = 0
        while at < len(text):
            size = self._random.choice((1, 2, 5, 11, 40))
            yield Delta(choice, text[at : at + size], [5], [])
            at += size
        completion = Completion(text, tokens, None, reason, usage)
        yield Delta(choice, "", [], [], completion)

    def cancel(self, indices) -> None:
        pass

    def close(self) -> None:
        pass

    def drain(self, seconds: float) -> bool:
        return True

    def snapshot(self) -> Snapshot:
        return Snapshot(alive=True)


@dataclasses.dataclass
class ScriptedClient(Client):
    """A client of a scripted server; `service` is a `ScriptedService`."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path, status=200, **body):
        """Returns the JSON answer of an endpoint."""
        response = self.send(body, path=path)
        answer = json.loads(response.read())
        assert response.status == status, answer
        return answer

    def named_events(self, path, **body):
        """Returns the data of a stream's events, each of which is named by its type."""
        response = self.send(body | {"stream": True}, path=path)
        assert response.status == 200, response.read()
        found = []
        for event in response.read().decode().split("\n\n")[:-1]:
            name, data = event.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found


def served_model(template: str, **more) -> ServedModel:
    """Returns what HTTP knows of a model with one of the templates."""
    options = dict(
        models={"scripted": None},
        policy="Vanilla",
        config=dataclasses.replace(_config(), vocab_size=200_000),
        tokenizer=tokenizer(template),
        max_tokens=MAX_TOKENS,
        max_requests=16,
        defaults=dms_jax.Sampling(max_new_tokens=1024),
        seed=0,
        call_format=None if template not in FORMATS else template,
    )
    return ServedModel(**options | more)


def _config() -> ModelConfig:
    return dataclasses.replace(stories().config, max_position_embeddings=10**6)


@contextlib.contextmanager
def scripted(template: str, script: Script, **more) -> Iterator[ScriptedClient]:
    """A client of a server that answers prompts in a template by a script."""
    served = served_model(template, **more)
    service = ScriptedService(served.tokenizer, script)
    with connected(service, served) as (port, engine):
        yield ScriptedClient(port, service, engine)
