"""DeepResearcher: search a web, read its pages with a reader, answer."""
