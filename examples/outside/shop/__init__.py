"""Searches of a shop: tasks, environment, reward and learner of a project outside."""
