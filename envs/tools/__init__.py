"""Tools that a policy calls: how a turn writes calls, and what answers them."""
