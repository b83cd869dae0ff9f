"""Training loop: the algorithm, its batches, ledger, stages and guard."""
