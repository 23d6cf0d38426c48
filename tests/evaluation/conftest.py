"""What asks, counts, resumes and reports runs on programs that compute nothing."""

import pytest


@pytest.fixture
def fakes():
    # Not at the top: jax may not be imported before the suite's own conftest has set it up.
    from tests.support.fake_programs import faked

    with faked():
        yield
