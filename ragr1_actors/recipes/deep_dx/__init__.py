"""Deep-DxSearch: a diagnosis with tools for similar patients and for diseases."""
