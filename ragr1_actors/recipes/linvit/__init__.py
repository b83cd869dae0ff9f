"""LINVIT: value iteration that keeps near a language model, which proposes actions and is not trained."""
