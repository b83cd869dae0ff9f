"""Model folders of Hugging Face: their files, shapes, and code that they bring."""
