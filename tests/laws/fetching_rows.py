"""Rows of KCache: alone, over DMS, and over DMS in 8 bits."""

import functools

from dms_jax.policies import DMS, KCache
from tests.laws.row import Row
from tests.oracles import float8, kcache


def rows(simulate_dms, dms_decisions, stored_keys) -> list[Row]:
    """The rows, given how the table simulates what is underneath."""

    def options(policy, layer):
        return dict(
            top=policy.top,
            layer=layer.index,
            device_layers=policy.first_layers,
            renormalize=policy.renormalize,
        )

    def plain(policy, layer, prompt_length, page_size):
        del page_size
        return kcache.simulate(*layer.rotated, prompt_length, **options(policy, layer))

    def over_dms(policy, layer, prompt_length, page_size, snap=lambda x: x):
        _, (q, k, v) = dms_decisions(policy.over, layer)
        kept = simulate_dms(policy.over, layer, prompt_length, page_size)
        return kcache.simulate(
            q, snap(k), snap(v), prompt_length, kept=kept, **options(policy, layer)
        )

    make = functools.partial(Row, selects=True)
    top = functools.partial(make, simulate=plain)
    survivors = functools.partial(make, simulate=over_dms)
    return [
        top(KCache(top=5, first_layers=1), group=1, page_size=4),
        top(KCache(top=3, first_layers=0), group=2, page_size=5),
        top(KCache(top=1, first_layers=0, renormalize=True), group=4, page_size=3),
        top(KCache(top=8, first_layers=1), group=8, page_size=16),
        top(KCache(top=64, first_layers=0), group=4, page_size=5, identity=True),
        survivors(KCache(top=3, first_layers=0, over=DMS(window=3)), group=2, page_size=3),
        survivors(
            KCache(top=4, first_layers=1, over=DMS(window=5, source="adapter")),
            group=4,
            page_size=4,
        ),
        make(
            KCache(top=4, first_layers=0, over=DMS(window=4)),
            functools.partial(over_dms, snap=float8.snap),
            group=2,
            page_size=4,
            keys=stored_keys,
            kv_dtype="float8_e4m3",
        ),
    ]
