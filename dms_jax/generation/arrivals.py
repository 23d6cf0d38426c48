"""Requests that come while a call runs: they join it between two chunks, with their own sampling.

    chunk 1   request 0  request 1
    chunk 2   request 0  request 1  request 2     came during chunk 1, and a lane was free
    chunk 3   request 0             request 2     request 1 has ended

Programs that serve such a call have the sampling of each lane as an input, so requests that differ
in it run together and compile nothing.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from dms_jax.generation.launched import Launched
from dms_jax.generation.requests import Request
from dms_jax.generation.sampling import Filter, LanesFilter, Sampling

# Returns the requests that came since it was last called, or None when no more will come. If it is
# called with True, nothing else is to be done, and it may wait until some come.
Incoming = Callable[[bool], Sequence[Request] | None]


@dataclasses.dataclass
class Arrivals:
    """What comes during one call of an engine.

    Attributes:
      num_lanes: number of lanes.
      incoming: gives requests; None if all are given at the start and share one sampling.
    """

    num_lanes: int
    incoming: Incoming | None = None

    def __post_init__(self):
        self._filter = LanesFilter(self.num_lanes)

    def receive(
        self,
        launched: Launched,
        waiting: collections.deque[Request],
        running: Mapping[int, Request],
        before_waiting: Callable[[], None],
    ) -> bool:
        """Lets requests that came wait; returns whether more may come or some are to be served."""
        idle = not (waiting or running)
        if idle:
            before_waiting()
            launched.read_steps()  # what answers that a stop string ended had launched
        came = None if self.incoming is None else self.incoming(idle)
        for request in came or ():
            launched.runner.raise_max_length(request.max_length)
            waiting.append(request)
        return came is not None or bool(waiting or running)

    def defers(self, running: Mapping[int, Request], drawn: frozenset[int]) -> bool:
        """Whether the first tokens that were drawn are read behind the launch of the steps.

        A lane whose first token is its last takes none of these. A stop string only the text tells.
        """
        requests = [running[lane] for lane in drawn & running.keys()]
        return self.incoming is not None and not any(
            each.sampling.stop_strings for each in requests
        )

    def filter(self, sampling: Sampling, running: Mapping[int, Request]) -> Filter:
        """Returns the filter of the next program.

        Args:
          sampling: that of the call.
          running: lane -> its request.
        """
        if self.incoming is None:
            return sampling.filter
        return self._filter.of({lane: each.sampling for lane, each in running.items()})
