"""The supervisor of all actors: fleets of members, the watchdog that notices deaths and hangs, causes of deaths."""
