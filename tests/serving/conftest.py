"""One server, mostly on fake programs, for all tests that do not change it."""

import pytest


@pytest.fixture(scope="package")
def client():
    """A client of a server with four lanes."""
    from tests.serving.support import serving

    with serving() as made:
        yield made


@pytest.fixture
def idle(client):
    """The client while the server is idle; afterwards it is idle again."""
    from tests.serving.support import wait_until

    def nothing():
        snapshot = client.service.snapshot()
        return not (snapshot.running or snapshot.waiting or snapshot.pages_in_use)

    wait_until(nothing)
    yield client
    wait_until(nothing)
