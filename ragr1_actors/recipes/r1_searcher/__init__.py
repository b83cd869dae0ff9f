"""R1-Searcher: a first stage that teaches to search, a second one that teaches to be right, without demonstrations."""
