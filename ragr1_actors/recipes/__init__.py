"""The recipes: one YAML file each, ``section.key`` as in ``ragr1_actors.config``, every one loaded by a test."""
