"""The tools that a request offers, and whether and how often the model may call them."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dms_jax.checks import show
from dms_jax.generation.answer_readers import Tool
from dms_jax.serving.refusals import RefusalError

MOST_TOOLS = 512
_LONGEST_NAME = 256


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools of a request.

    Attributes:
      offered: the tools in the prompt.
      required: whether the answer must call one.
      parallel: whether it may call several.
      named: the only tool that it may call, if the client names one.
    """

    offered: tuple[Tool, ...] = ()
    required: bool = False
    parallel: bool = True
    named: str | None = None

    @classmethod
    def of(
        cls,
        tools: Iterable[Tool],
        choice: Any = "auto",
        *,
        named: str | None = None,
        parallel: bool = True,
    ) -> "Tools":
        """Returns the tools that a request offers.

        Args:
          tools: its tools.
          choice: "auto", "required" to force a call, or "none" to hide all tools.
          named: the tool that it must call.
          parallel: whether it may call several.

        Raises:
          RefusalError: two tools have the same name, or the tool to call is unknown.
        """
        found = tuple(tools)
        names = [tool.name for tool in found]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise RefusalError(
                f"tools: {show(twice[0])} is the name of {names.count(twice[0])} tools. Give each "
                "a different name.",
                param="tools",
            )
        if not isinstance(choice, str) or choice not in ("auto", "none", "required"):
            raise RefusalError(
                f'tool_choice must be "auto", "none", "required" or name a function, got '
                f"{show(choice)}.",
                param="tool_choice",
            )
        if named is not None and named not in names:
            raise RefusalError(
                f"tool_choice names {show(named)}, which is not one of the tools "
                f"({show(', '.join(names))}).",
                param="tool_choice",
            )
        if choice == "required" and not found:
            raise RefusalError("tool_choice needs tools, and there are none.", param="tools")
        if choice == "none" and named is None:
            return cls()
        return cls(found, choice == "required" or named is not None, parallel, named)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the answer may call: the named one, or all."""
        return tuple(t for t in self.offered if self.named in (None, t.name))


NO_TOOLS = Tools()


def read_choice(given: Mapping[str, Any], tools: Sequence[Tool]) -> tuple[Any, str | None]:
    """Returns OpenAI's `tool_choice` as a choice of `Tools.of`, and the function that it names."""
    choice = given.get("tool_choice", "auto" if tools else "none")
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        beside = choice.get("name")  # in the Responses API
        name = function.get("name", beside) if isinstance(function, dict) else beside
        if isinstance(name, str):
            return "required", name
    return choice, None


def make_tool(function: Any, where: str, *, schema: str = "parameters") -> Tool:
    """Returns the tool that a JSON object describes.

    Args:
      function: the object: name, description and schema of the arguments.
      where: its path in the request, for errors.
      schema: name of the schema's field.

    Raises:
      RefusalError: it is malformed.
    """
    if not isinstance(function, dict):
        raise RefusalError(f"{where} must be an object, got {show(function)}.", param="tools")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise RefusalError(f"{where}.name must be a text, got {show(name)}.", param="tools")
    if not isinstance(description, str | None):
        raise RefusalError(
            f"{where}.description must be a text, got {show(description)}.", param="tools"
        )
    parameters = function.get(schema)
    parameters = {"type": "object", "properties": {}} if parameters is None else parameters
    if not isinstance(parameters, dict):
        raise RefusalError(
            f"{where}.{schema} must be a JSON schema, which is an object, got {show(parameters)}.",
            param="tools",
        )
    return Tool(name, description or "", parameters, function.get("strict") is True)


def check_tools(tools: Any) -> list[Any]:
    """Returns the list of tools of a request; raises RefusalError if it is not a list."""
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        raise RefusalError(
            f"tools must be a list of at most {MOST_TOOLS}, got {show(tools)}.", param="tools"
        )
    return tools
