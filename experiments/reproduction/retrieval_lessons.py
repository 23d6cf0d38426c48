"""Lessons for what mathematics does not teach: to find things in long texts, and to read on.

The problems ask for the skills that RULER measures, in other words than RULER's: facts in a novel
(`lockers`), chains of references (`parcels`), and frequent words of a list (`orders`).
"""

import itertools
import random
from typing import Any

import numpy as np

from dms_jax import assets
from dms_jax.data import Exchange
from dms_jax.data.tasks.words import ADJECTIVES, NOUNS

_SHARES = (0.4, 0.8)  # of the longest sequence that the text of a problem takes
_GIVEN = 16  # tokens of a piece of a novel that are its prompt
_TEMPLATE = 64  # tokens of a chat template, at most


def lessons(tokenizer: Any, length: int, *, problems: int, windows: int) -> list[Any]:
    """Returns documents of at most `length` tokens, the same in every call.

    Args:
      tokenizer: tokenizer of the model; every other problem is a chat if it has a chat template.
      length: tokens of the longest document.
      problems: number of problems.
      windows: number of pieces of novels.
    """
    rng = random.Random(0)
    words = " ".join(assets.books("train")).split()
    a_word = len(_encode(tokenizer, " ".join(words[:5000]))) / 5000
    found: list[Any] = []
    while len(found) < problems:
        number = len(found)
        kind = (lockers, parcels, orders)[number % 3]
        size = int(rng.uniform(*_SHARES) * length / a_word)
        text, question, answer = kind(rng, words, size)
        asked = f"{text}\n\n{question}"
        if len(_encode(tokenizer, asked + answer)) > length - _TEMPLATE:
            continue
        if tokenizer.chat_template and number % 2:
            found.append(Exchange([{"role": "user", "content": asked}], answer))
        else:
            found.append(Exchange(f"{asked}\nAnswer:", f" {answer}"))
    for _ in range(windows):
        start = rng.randrange(len(words) - length)
        window = _encode(tokenizer, " ".join(words[start : start + length]))
        prompt, rest = np.split(np.asarray(window[:length], np.int32), [_GIVEN])
        found.append(Exchange(prompt, rest))
    return found


def lockers(rng: random.Random, words: list[str], size: int) -> tuple[str, str, str]:
    """Facts in a novel: which code opens which locker; some lockers have several codes."""
    owners = _names(rng, rng.choice((2, 4, 8, 16)))
    codes = {
        owner: [str(rng.randrange(10**4, 10**8)) for _ in range(rng.choice((1, 1, 2, 4)))]
        for owner in owners
    }
    facts = [
        [f"Note that {code} opens the locker of the {owner}."]
        for owner, own in codes.items()
        for code in own
    ]
    asked = rng.sample(owners, min(len(owners), 8))
    listed = ", ".join(f"the {owner}" for owner in asked)
    question = f"Which numbers open these lockers, according to the text: {listed}? List all."
    answer = "; ".join(f"the {owner}: {', '.join(codes[owner])}" for owner in asked)
    return _hidden(rng, words, size, facts), question, answer


def parcels(rng: random.Random, words: list[str], size: int) -> tuple[str, str, str]:
    """Chains: a parcel goes where an earlier one goes; asked for the parcels of each town."""
    names = iter(_names(rng, 24))
    chains = {
        town: [next(names) for _ in range(rng.choice((3, 4, 5)))]
        for town in rng.sample(("Lima", "Oslo", "Cairo", "Quito", "Hanoi"), rng.choice((2, 3, 4)))
    }
    facts = [
        [f"Parcel {own[0]} is sent to {town}."]
        + [f"Parcel {new} follows parcel {old}." for old, new in itertools.pairwise(own)]
        for town, own in chains.items()
    ]
    asked = rng.sample(list(chains), len(chains))
    question = (
        f"Parcels that follow another one go to the same town. Which ones reach {', '.join(asked)}?"
    )
    answer = "; ".join(f"{town}: {', '.join(chains[town])}" for town in asked)
    return _hidden(rng, words, size, facts), question, answer


def orders(rng: random.Random, words: list[str], size: int) -> tuple[str, str, str]:
    """A long list of orders: which goods were ordered most often."""
    del words
    goods = rng.sample(NOUNS, min(len(NOUNS), 60))
    count, most = rng.choice((3, 5, 10)), max(size // 12, 4)
    often, seldom = goods[:count], goods[count:]
    listed = [name for k, name in enumerate(often) for _ in range(max(most - k, 3))]
    listed += [rng.choice(seldom) for _ in range(max(size - len(listed), 0) // 2)]
    rng.shuffle(listed)
    shop = "Today's orders of the shop, one after the other: " + ", ".join(listed) + "."
    order = sorted(often, key=lambda name: (-listed.count(name), name))
    return shop, f"Which {count} goods were ordered most often?", ", ".join(order)


def _names(rng: random.Random, count: int) -> list[str]:
    names = {f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}" for _ in range(2 * count)}
    return rng.sample(sorted(names), count)


def _hidden(rng: random.Random, words: list[str], size: int, chains: list[list[str]]) -> str:
    """Returns `size` words of a novel with facts at random places, those of a chain in order."""
    start = rng.randrange(len(words) - size)
    text, places = words[start : start + size], list[tuple[int, str]]()
    for facts in chains:
        at = sorted(rng.randrange(size + 1) for _ in facts)
        places += zip(at, facts, strict=True)
    for place, fact in sorted(places, reverse=True):
        text.insert(place, fact)
    return " ".join(text)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
