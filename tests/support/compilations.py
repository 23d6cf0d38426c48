"""Counts jax's compilations."""

import jax


class Compilations:
    """Counts the programs that jax traces and lowers."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, name: str, seconds: float, **_) -> None:
        # Traced and lowered, whether or not the persistent cache holds the result.
        self.count += name == "/jax/core/compile/jaxpr_to_mlir_module_duration"

    def of(self, call) -> int:
        before = self.count
        call()
        return self.count - before
