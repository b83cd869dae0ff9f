"""``ragr1 bench scale``."""
