"""`RefusalError`: a request that is refused, and the HTTP response to it."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from dms_jax.checks import show
from dms_jax.errors import ConfigError, DataError, DmsJaxError, TooLongError, plain

TOO_LONG = "context_length_exceeded"  # OpenAI's code; clients that see it send less
_LONGEST_MESSAGE = 2000


class RefusalError(DmsJaxError):
    """A request is refused; the HTTP response to it.

    Args:
      message: what is wrong and what to do.
      status: HTTP status.
      param: the field that is wrong.
      code: OpenAI's code of the error, for programs.
      retry_after: seconds after which to try again.
    """

    def __init__(
        self,
        message: object,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    @property
    def kind(self) -> str:
        """OpenAI's type of the error."""
        if self.status >= 500:
            return "server_error"
        return {429: "rate_limit_error"}.get(self.status, "invalid_request_error")

    @property
    def message(self) -> str:
        """The message for the client; it may quote anything that the client sent."""
        return plain(self, _LONGEST_MESSAGE, lines=True)

    def openai_body(self) -> dict[str, Any]:
        """Returns OpenAI's form of the error."""
        param = None if self.param is None else plain(self.param)
        error = {"message": self.message, "type": self.kind, "param": param, "code": self.code}
        return {"error": error}


def unknown_model(asked: Any, names: Iterable[str]) -> RefusalError:
    """Returns the error for a model that is not in `names`."""
    return RefusalError(
        f"There is no model {show(asked)} here, only {', '.join(map(repr, names))}.",
        status=404,
        param="model",
        code="model_not_found",
    )


def unserved(name: str, value: Any, why: str = "") -> RefusalError:
    """Returns the error for a field value that is not supported."""
    return RefusalError(
        f"{name}={show(value)} is not supported{f': {why}' if why else ''}. Leave it out.",
        param=name,
        code="unsupported_parameter",
    )


@contextlib.contextmanager
def naming(param: str | None, where: str = "") -> Iterator[None]:
    """A context that turns ConfigError and DataError into a RefusalError that names a field.

    Args:
      param: the field.
      where: what their messages begin with.
    """
    try:
        yield
    except (RefusalError, TooLongError):
        raise
    except (ConfigError, DataError) as error:
        what = f"{where}: {error}" if where else error
        raise RefusalError(what, param=param) from None
