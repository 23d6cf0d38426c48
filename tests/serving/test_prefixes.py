"""A server caches prefixes, reports them in usage and metrics, and answers the same."""

import pytest

import dms_jax
from tests.serving.support import serving, wait_until

pytestmark = pytest.mark.usefixtures("fakes")
SYSTEM = {"role": "system", "content": "Tell a story of a girl and her dog, and of what they saw."}
DROPPED = ("created", "id", "usage")


POLICY = dms_jax.RandomEviction(window=10, rate=0.6)


@pytest.fixture
def keeping():
    with serving(policy=POLICY, prefix_cache=1e6) as client:
        yield client


@pytest.fixture
def anew():
    with serving(policy=POLICY) as client:
        yield client


def ask(client, messages, **more):
    body = dict(messages=messages, max_tokens=12, temperature=0, **more)
    answer = client.ask(chat=True, **body)
    return answer, {key: value for key, value in answer.items() if key not in DROPPED}


def test_next_turn_prefills_only_new_tokens(keeping, anew):
    """The next prompt repeats the answer; usage has the cached tokens, and answers are equal.

    Only the first answer has the same tokens in the next prompt. The second turn does not stop in
    its own, so the third one continues from the first answer, too; the fourth from the third.
    """
    messages = [SYSTEM, {"role": "user", "content": "Begin."}]
    cached, total = [], 0
    for turn in range(4):
        answer, content = ask(keeping, messages)
        assert content == ask(anew, messages)[1]
        usage = answer["usage"]
        total += usage["prompt_tokens"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert anew.ask(chat=True, messages=messages)["usage"]["prompt_tokens_details"] == {
            "cached_tokens": 0
        }
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"More {turn}."}]
    assert cached == [0, 61, 61, 112]
    wait_until(lambda: keeping.metric("dms_jax_running") == 0)
    assert keeping.metric("dms_jax_prefix_hits_total") == 3
    assert keeping.metric("dms_jax_cached_tokens_total") == sum(cached)
    assert keeping.metric("dms_jax_prompt_tokens_total") == total
    assert keeping.metric("dms_jax_prefixes") > 0
    assert keeping.metric("dms_jax_prefix_bytes") > 0
    assert keeping.metric("dms_jax_pages_free") == keeping.service._pages  # requests may have them


def test_choices_count_cached_tokens_once(keeping):
    messages = [SYSTEM, {"role": "user", "content": "Begin."}]
    first, _ = ask(keeping, messages, n=3)
    again, _ = ask(keeping, messages, n=3)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < again["usage"]["prompt_tokens"]
    assert cached % 16 == 0


def test_choices_that_share_pages_count_only_what_was_cached_before(keeping):
    """All but the first choice of each prompt continue from its pages."""
    prompts, sizes = [[5] * 150, [6] * 140, [7] * 9], []
    for body in (
        dict(prompt=prompts[0], n=3),
        dict(prompt=prompts, n=3),
        dict(prompt=prompts, n=2),
    ):
        whole, body = keeping.ask(max_tokens=4, **body), body | dict(max_tokens=4)
        sizes.append(whole["usage"]["prompt_tokens_details"]["cached_tokens"])
    usage = keeping.stream(stream_options={"include_usage": True}, **body)[-1]["usage"]
    assert sizes == [0, 144, 144 + 128]
    assert usage["prompt_tokens_details"]["cached_tokens"] == sizes[-1]
