"""Experiments with the whole system: claims of the recipes, chaos, and simulation."""
