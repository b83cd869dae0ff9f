"""What a run says of itself while it trains: metrics and where they go, progress, incidents, alarms, examples."""
