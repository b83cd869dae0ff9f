"""The trained models: scoring, attention over packed rows, LoRA, export."""
