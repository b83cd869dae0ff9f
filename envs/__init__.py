"""Environments, their actions, rewards and tasks."""
