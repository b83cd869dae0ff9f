"""InteR: a retriever and a language model that help each other to expand a query."""
