"""Runs with a real language model: SmolLM2-135M-Instruct in the generated world, and on 2WikiMultihopQA."""
