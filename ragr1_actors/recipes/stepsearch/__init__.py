"""StepSearch: a reward per search, for the evidence that it adds."""
