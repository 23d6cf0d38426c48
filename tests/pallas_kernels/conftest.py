"""Setup of kernel tests: only tests marked `gpu` depend on the machine's card."""

import pytest


@pytest.fixture(autouse=True)
def any_machine(request, monkeypatch):
    """Unless marked `gpu`, a test runs on the CPU, and plans are made for an H200."""
    import jax  # after tests/conftest.py has set up jax

    from pallas_kernels import dispatch

    if request.node.get_closest_marker("gpu"):
        yield
        return
    monkeypatch.setattr(dispatch, "_local_gpu", lambda: None)
    with jax.default_device(jax.devices("cpu")[0]):
        yield
