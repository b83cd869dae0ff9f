"""Engines: ``generate(prompt_token_ids, sampling) -> Completion`` over one model."""
