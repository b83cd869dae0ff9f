"""Telemetry of a training run: metrics and their destinations, progress, incidents, alarms, examples."""
