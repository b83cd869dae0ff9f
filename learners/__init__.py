"""Gradients: advantages, losses, packing and the learners that use them."""
