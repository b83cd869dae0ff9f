"""Where the system runs: Ray sessions, elastic fleets and weight transport."""
