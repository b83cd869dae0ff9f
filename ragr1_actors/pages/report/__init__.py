"""``report.html``: one page about a run that opens without a network, made of the files in its directory."""
