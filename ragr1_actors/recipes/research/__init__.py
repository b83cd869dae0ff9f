"""ReSearch: GRPO with a reward of the format and F1 in one, and answers in a box."""
