"""ServerMetrics: what the HTTP door counts, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class ServerMetrics:
    """Counters of one server since its start."""

    def __init__(self) -> None:
        """Count from 0."""
        self.num_in_flight = 0
        """Requests to ``/retrieve`` that are being answered."""
        self._requests: Counter[tuple[str, int]] = Counter()
        self._num_queries = 0
        self._buckets = [0] * (len(_BOUNDS_S) + 1)
        self._seconds = 0.0

    def add_request(self, path: str, status: int) -> None:
        """Count an answer. ``path`` is one of a few: each is a time series for ever."""
        self._requests[path, status] += 1

    def add_search(self, num_queries: int, seconds: float) -> None:
        """Count the queries of one request that were answered, and the time it took from its first byte."""
        self._num_queries += num_queries
        self._buckets[bisect_left(_BOUNDS_S, seconds)] += 1
        self._seconds += seconds

    def render(self) -> str:
        """Return all of it as text."""
        lines = ["# HELP ragr1_http_requests_total Requests answered.", "# TYPE ragr1_http_requests_total counter"]
        lines += [
            f'ragr1_http_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self._requests.items())
        ]
        lines += [
            "# HELP ragr1_retrieve_queries_total Queries answered.",
            "# TYPE ragr1_retrieve_queries_total counter",
            f"ragr1_retrieve_queries_total {self._num_queries}",
            "# HELP ragr1_retrieve_requests_in_flight Requests being answered.",
            "# TYPE ragr1_retrieve_requests_in_flight gauge",
            f"ragr1_retrieve_requests_in_flight {self.num_in_flight}",
            "# HELP ragr1_retrieve_duration_seconds Time to answer a request.",
            "# TYPE ragr1_retrieve_duration_seconds histogram",
        ]
        counts = list(accumulate(self._buckets))
        bounds = [*[f"{bound:g}" for bound in _BOUNDS_S], "+Inf"]
        lines += [
            f'ragr1_retrieve_duration_seconds_bucket{{le="{bound}"}} {count}'
            for bound, count in zip(bounds, counts, strict=True)
        ]
        lines += [
            f"ragr1_retrieve_duration_seconds_sum {self._seconds:.6f}",
            f"ragr1_retrieve_duration_seconds_count {counts[-1]}",
        ]
        return "\n".join(lines) + "\n"
