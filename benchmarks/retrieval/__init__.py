"""Search: the fleet against the usual HTTP server, and rates of index types and libraries."""
