"""DeepResearcher: search a web, read its pages with a reader, answer; what the web said is recorded and replayed."""
