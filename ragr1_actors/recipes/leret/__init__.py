"""LeReT: attempts with several prompts, compared by what they retrieve, and learned under one prompt."""
