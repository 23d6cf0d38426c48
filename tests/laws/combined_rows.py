"""Rows for combinations beyond the papers: selection and fetching after eviction, small caches.

For a cache of 8 or 4 bits the simulation is the same over quantized keys and values (`snap`); a
policy without eviction is then vanilla attention over quantized numbers.
"""

import functools

from dms_jax.policies import DMS, TOVA, KCache, Quest, Vanilla
from tests.laws.dms_simulations import dms_decisions, simulate_dms
from tests.laws.row import Row
from tests.oracles import dms, float8, int4, kcache, quest, tova, vanilla


def unchanged(x):
    return x


def stored_keys(policy, layer, snap):
    """Returns the rotated keys as they are stored."""
    return snap(layer.rotated[1])


def simulate_dms_stored(policy, layer, prompt_length, page_size, snap):
    """Simulates DMS with the same decisions over quantized keys and values."""
    decisions, (q, k, v) = dms_decisions(policy, layer)
    return dms.simulate(
        q,
        snap(k),
        snap(v),
        decisions=decisions,
        window=policy.window,
        shift=policy.shift,
        per=policy.per,
    )


def simulate_vanilla_stored(policy, layer, prompt_length, page_size, snap):
    q, k, v = layer.rotated
    return vanilla.simulate(q, snap(k), snap(v))


def simulate_tova_stored(policy, layer, prompt_length, page_size, snap):
    q, k, v = layer.rotated
    return tova.simulate(q, snap(k), snap(v), budget=policy.budget)


def simulate_quest_over_dms(policy, layer, prompt_length, page_size, snap=unchanged):
    """Simulates page selection among the tokens that DMS keeps."""
    _, (q, k, v) = dms_decisions(policy.over, layer)
    return quest.select_over(
        simulate_dms(policy.over, layer, prompt_length, page_size),
        q,
        snap(k),
        snap(v),
        prompt_length,
        budget=policy.budget,
        page_size=page_size,
        force_last_page=policy.force_last_page,
        layer=layer.index,
        dense_layers=policy.dense_layers,
    )


def fetching(policy, layer):
    return dict(
        top=policy.top,
        layer=layer.index,
        device_layers=policy.first_layers,
        renormalize=policy.renormalize,
    )


def simulate_kcache(policy, layer, prompt_length, page_size):
    return kcache.simulate(*layer.rotated, prompt_length, **fetching(policy, layer))


def simulate_kcache_over_dms(policy, layer, prompt_length, page_size, snap=unchanged):
    """Simulates value fetching among the tokens that DMS keeps."""
    _, (q, k, v) = dms_decisions(policy.over, layer)
    kept = simulate_dms(policy.over, layer, prompt_length, page_size)
    return kcache.simulate(q, snap(k), snap(v), prompt_length, kept=kept, **fetching(policy, layer))


def in_bits(snap, kv_dtype: str):
    """Returns what makes rows of a cache that stores what `snap` leaves of numbers."""

    def make(policy, simulate, group, page_size, **fields) -> Row:
        simulate, keys = (functools.partial(x, snap=snap) for x in (simulate, stored_keys))
        return Row(policy, simulate, group, page_size, keys=keys, kv_dtype=kv_dtype, **fields)

    return make


in_8_bits = in_bits(float8.snap, "float8_e4m3")
in_4_bits = in_bits(int4.snap, "int4")


def rows() -> list[Row]:
    adapter = DMS(window=4, source="adapter")
    make = functools.partial(Row, selects=True)
    pages = functools.partial(make, simulate=simulate_quest_over_dms)
    top = functools.partial(make, simulate=simulate_kcache)
    survivors = functools.partial(make, simulate=simulate_kcache_over_dms)
    last = dict(force_last_page=False, dense_layers=0)
    pages_of = Quest(budget=8, dense_layers=0, over=DMS(window=4))
    values_of = KCache(top=4, first_layers=0, over=DMS(window=4))
    return [
        pages(Quest(budget=6, dense_layers=0, over=DMS(window=3)), group=1, page_size=3),
        pages(Quest(budget=8, dense_layers=1, over=DMS(window=6)), group=2, page_size=4),
        pages(Quest(budget=4, dense_layers=0, over=adapter), group=4, page_size=2),
        pages(Quest(budget=9, over=DMS(window=2, shift=0), **last), group=8, page_size=3),
        top(KCache(top=5, first_layers=1), group=1, page_size=4),
        top(KCache(top=3, first_layers=0), group=2, page_size=5),
        top(KCache(top=1, first_layers=0, renormalize=True), group=4, page_size=3),
        top(KCache(top=8, first_layers=1), group=8, page_size=16),
        top(KCache(top=64, first_layers=0), group=4, page_size=5, identity=True),
        survivors(KCache(top=3, first_layers=0, over=DMS(window=3)), group=2, page_size=3),
        survivors(KCache(top=4, first_layers=1, over=adapter), group=4, page_size=4),
        in_8_bits(DMS(window=0, shift=0, source="adapter"), simulate_dms_stored, 4, 3),
        in_8_bits(Vanilla(), simulate_vanilla_stored, 2, 5),
        in_8_bits(TOVA(budget=8), simulate_tova_stored, 2, 5, ordered=False),
        in_8_bits(pages_of, simulate_quest_over_dms, 2, 4, selects=True),
        in_8_bits(values_of, simulate_kcache_over_dms, 2, 4, selects=True),
        in_4_bits(DMS(window=3), simulate_dms_stored, 2, 4),
        in_4_bits(TOVA(budget=8), simulate_tova_stored, 1, 5, ordered=False),
        in_4_bits(pages_of, simulate_quest_over_dms, 4, 4, selects=True),
        in_4_bits(values_of, simulate_kcache_over_dms, 1, 4, selects=True),
    ]
