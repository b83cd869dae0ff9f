"""The one door to DeepSpeed: engine, offloading, learning-rate schedule."""
