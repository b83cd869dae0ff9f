"""Preparation of a run: its plan in memory, disk and time, its pace, its data and the checks before it starts."""
