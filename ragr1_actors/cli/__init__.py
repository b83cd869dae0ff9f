"""The command line `ragr1`."""
