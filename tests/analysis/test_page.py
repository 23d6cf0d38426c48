"""The page that shows which tokens each head kept: data, structure, explanations."""

import html.parser
import json
import re

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.analysis import NEVER, Retention, View, eviction_page, token_texts
from dms_jax.analysis.page import explain
from dms_jax.policies import POLICIES

N = NEVER
VOID = {"meta", "input"}


def found_of(gone, policy=None, reads=None) -> Retention:
    gone = np.array(gone)
    tokens = np.zeros((gone.shape[1], gone.shape[3]), int)
    return Retention(
        policy=policy or dms_jax.TOVA(budget=2),
        tokens=tokens,
        prompt_lengths=np.zeros(len(tokens), int),
        gone=gone,
        reads=reads,
        num_query_heads=2,
    )


def data_of(page: str) -> dict:
    (line,) = re.findall(r"^const data = (.*);$", page, re.MULTILINE)
    return json.loads(line.replace("<\\/", "</"))


class Tags(html.parser.HTMLParser):
    """Checks that every element is closed, and collects what an element loads."""

    def __init__(self):
        super().__init__()
        self.open, self.loads = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_token_texts_join_to_the_text():
    model = dms_jax.load(str(assets.path("stories260k")))
    text = 'Lily said, "Café!"\nThe end.'
    tokens = model.tokenizer.encode(text)
    pieces = token_texts(model.tokenizer, tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == model.tokenizer.decode(tokens) == text


def test_page_has_every_token_and_lifetime():
    tokens = ["a", " </script>", '"b" @DATA@']
    one = found_of([[[[2, N, N]]], [[[1, 3, N]]]])
    two = found_of([[[[N, N, N]]], [[[N, N, N]]]], reads=np.array([[[[6, 3, 0]]], [[[0, 4, 2]]]]))
    views = [View.of(one, "first"), View.of(two)]
    page = eviction_page(tokens, views, title="<T>", note="n & @DATA@", prompt_length=2)
    assert page.count("<h1>&lt;T&gt;</h1>") == 1
    assert "n &amp; @DATA@" in page
    assert page.count("</script>") == 1  # the text cannot end the script
    data = data_of(page)
    assert data["tokens"] == tokens
    assert data["prompt"] == 2
    first, second = data["views"]
    assert (first["name"], second["name"]) == ("first", "TOVA")
    assert first["explanation"] == explain(dms_jax.TOVA(budget=2))
    # Queries that see a token, its own included; 0 for always.
    assert first["lifetimes"] == [[[2, 0, 0]], [[1, 2, 0]]]
    assert first["read"] is None
    # Token 0 could be read by two query heads in three steps, token 2 in one.
    assert second["read"] == [[[100, 75, 0]], [[0, 100, 100]]]


def test_html_in_the_text_stays_in_the_script():
    """After "<!--" and "<script" a browser would miss the end of the script."""
    tokens = ["<!--", " <script>", "</SCRIPT >"]
    page = eviction_page(tokens, [View.of(found_of([[[[N, N, N]]]]))], title="t")
    assert data_of(page)["tokens"] == tokens
    assert page.lower().count("<script") == page.lower().count("</script") == 1
    assert "<!--" not in page


def test_page_is_well_formed_and_loads_nothing():
    page = eviction_page(["a"], [View.of(found_of([[[[N]]]]))], title="t")
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.loads == []
    assert "prefers-color-scheme: dark" in page
    for address in ("http://", "https://", "@import", "url("):
        assert address not in page


def test_view_of_a_sequence():
    found = found_of([[[[1, N]], [[N, N]]]])
    chex.assert_trees_all_equal(View.of(found, sequence=1).gone, np.full((1, 1, 2), N))


def test_every_policy_is_explained():
    explained = {explain(policy()) for policy in POLICIES.values()}
    assert all(sentence.endswith(".") for sentence in explained)
    assert len(explained) == len(POLICIES)


@pytest.mark.parametrize(
    "policy",
    [
        dms_jax.KCache(top=4, over=dms_jax.DMS(window=7)),
        dms_jax.Quest(over=dms_jax.DMS(window=7)),
    ],
)
def test_a_policy_over_another_explains_both(policy):
    over = explain(policy.over)
    assert explain(policy) == f"{explain(type(policy)())} {over}"
    assert over == "Learned delayed eviction."


def test_bad_views_are_refused():
    view = View.of(found_of([[[[N, N]]]]))
    with pytest.raises(dms_jax.ConfigError, match="TOVA is of 2 tokens, and the text has 1"):
        eviction_page(["a"], [view], title="t")
    for wrong in (-1, 3):
        with pytest.raises(dms_jax.ConfigError, match=f"prompt_length .* 0 and 2, got {wrong}"):
            eviction_page(["a", "b"], [view], title="t", prompt_length=wrong)
    with pytest.raises(dms_jax.ConfigError, match="sequence 1: there are 1, the first is 0"):
        View.of(found_of([[[[N, N]]]]), sequence=1)
    with pytest.raises(dms_jax.ConfigError, match="at least one view"):
        eviction_page(["a"], [], title="t")
