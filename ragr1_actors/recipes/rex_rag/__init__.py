"""REX-RAG: forks of wrong attempts with hints, whose changed distribution the learner corrects for."""
