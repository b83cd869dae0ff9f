"""The loop of a run in virtual time, over scripted engines and retrievers: ``ragr1 simulate``."""
