"""Rows for combinations beyond the papers: selection and fetching after eviction, 8-bit caches.

For an 8-bit cache the simulation is the same over quantized keys and values (`snap`); a policy
without eviction is then vanilla attention over quantized numbers.
"""

import functools

from dms_jax.policies import DMS, TOVA, KCache, Quest, Vanilla
from tests.laws.dms_simulations import dms_decisions, simulate_dms
from tests.laws.row import Row
from tests.oracles import dms, float8, kcache, quest, tova, vanilla


def unchanged(x):
    return x


def stored_keys(policy, layer):
    """Returns the rotated keys, quantized to 8 bits."""
    return float8.snap(layer.rotated[1])


def simulate_dms_float8(policy, layer, prompt_length, page_size):
    """Simulates DMS with the same decisions over quantized keys and values."""
    decisions, (q, k, v) = dms_decisions(policy, layer)
    return dms.simulate(
        q,
        float8.snap(k),
        float8.snap(v),
        decisions=decisions,
        window=policy.window,
        shift=policy.shift,
        per=policy.per,
    )


def simulate_vanilla_float8(policy, layer, prompt_length, page_size):
    q, k, v = layer.rotated
    return vanilla.simulate(q, float8.snap(k), float8.snap(v))


def simulate_tova_float8(policy, layer, prompt_length, page_size):
    q, k, v = layer.rotated
    return tova.simulate(q, float8.snap(k), float8.snap(v), budget=policy.budget)


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


def in_8_bits(simulate):
    return functools.partial(simulate, snap=float8.snap)


def rows() -> list[Row]:
    adapter = DMS(window=4, source="adapter")
    make = functools.partial(Row, selects=True)
    pages = functools.partial(make, simulate=simulate_quest_over_dms)
    top = functools.partial(make, simulate=simulate_kcache)
    survivors = functools.partial(make, simulate=simulate_kcache_over_dms)
    stored = functools.partial(Row, keys=stored_keys, kv_dtype="float8_e4m3")
    last = dict(force_last_page=False, dense_layers=0)
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
        stored(DMS(window=3), simulate_dms_float8, group=2, page_size=4),
        stored(DMS(window=0, shift=0, source="adapter"), simulate_dms_float8, 4, 3),
        stored(DMS(window=6, shift=6, per="layer"), simulate_dms_float8, group=1, page_size=5),
        stored(Vanilla(), simulate_vanilla_float8, group=2, page_size=5),
        stored(TOVA(budget=8), simulate_tova_float8, group=2, page_size=5, ordered=False),
        stored(
            Quest(budget=8, dense_layers=0, over=DMS(window=4)),
            in_8_bits(simulate_quest_over_dms),
            group=2,
            page_size=4,
            selects=True,
        ),
        stored(
            KCache(top=4, first_layers=0, over=DMS(window=4)),
            in_8_bits(simulate_kcache_over_dms),
            group=2,
            page_size=4,
            selects=True,
        ),
    ]
