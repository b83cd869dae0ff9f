"""Model folders as Hugging Face keeps them: their files, shapes, and code that they bring."""
