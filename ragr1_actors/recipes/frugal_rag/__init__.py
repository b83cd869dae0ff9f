"""FrugalRAG: SFT teaches to explore, GRPO with a reward on the number of searches teaches when to stop."""
