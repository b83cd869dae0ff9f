"""Tools that a policy calls: grammars of calls, and the tools that answer them."""
